"""A run's iterations as a discrete-event simulation: how fast which placement would be, and where its devices would stand idle."""
