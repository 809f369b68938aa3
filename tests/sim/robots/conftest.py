"""Drawing without a screen has to be chosen before MuJoCo is imported."""

from embodied_rl.sim.rendering import configure_rendering

configure_rendering()
