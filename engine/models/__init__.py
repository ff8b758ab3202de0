"""Weights and the decoder. Knows no scheduler, no socket and no text."""
