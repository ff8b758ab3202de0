"""The HTTP door: a process of its own, an ordinary client of the front."""
