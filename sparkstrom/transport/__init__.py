"""Transports: send and receive frames of bytes between endpoints."""
