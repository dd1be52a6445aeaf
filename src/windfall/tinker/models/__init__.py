"""Models of clients, and the slots of the trainer and of workers in which their adapters are."""
