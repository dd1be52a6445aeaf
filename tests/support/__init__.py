"""What several tests use: engines, controllers and workers without their processes, and stand-ins of other systems."""
