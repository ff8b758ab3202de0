"""Where models come from. Knows nothing of what is in them."""
