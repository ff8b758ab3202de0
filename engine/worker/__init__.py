"""One process per device: receive, schedule, launch, emit."""
