"""Spark Connect: what fits ask of Spark, by DataFrames alone; the rules are the classic path's."""
