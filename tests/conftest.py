"""Owns what all tests share: the hypothesis profile. Each system test makes its own run directory (see harness)."""

from hypothesis import HealthCheck, settings

settings.register_profile("engine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("engine")
