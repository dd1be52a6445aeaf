"""Controllers, workers, lenders and providers without their processes: on loopback, or in virtual time."""
