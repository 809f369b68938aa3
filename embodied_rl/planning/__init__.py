"""A run's iterations as a discrete-event simulation: the speed of each placement, and where its devices would be idle."""
