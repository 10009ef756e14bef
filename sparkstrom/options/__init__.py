"""Declare and check the options of the training masters, and read them from configuration."""
