"""The data plane: request table, order, admission, routing. Knows no model and no process."""
