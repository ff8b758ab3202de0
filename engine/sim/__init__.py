"""The fake model: only weights and sampler are fake."""
