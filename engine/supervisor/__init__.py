"""The control plane: spawns, watches, restarts and drains workers. Knows no request."""
