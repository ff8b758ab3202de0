"""The inference engine: front, supervisor, workers and their libraries. Imports nothing by itself."""

__version__ = "0.1.0"
