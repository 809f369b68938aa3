"""What `python -m embodied_rl.doctor` tries, by kind: the base, the machine, training, simulators and drawing."""
