"""A one-jointed arm lifts a weight to an angle and holds it there: m l² θ'' = τ − m g l sin θ − b θ'."""

import numpy as np

from embodied_rl.sim.env import SimEnv
from embodied_rl.sim.snapshots import decode_state, encode_state
from embodied_rl.types import ActionSpec, SimSpec, TensorSpec

MASS, LENGTH, DAMPING, MAX_TORQUE, DT, SUBSTEPS, LIMIT = 1.0, 0.5, 0.5, 8.0, 0.01, 5, 60  # kg, m, N m s, N m, s, -, steps


class MyRobot(SimEnv):
    def __init__(self, num_envs, task="LiftWeight", gravity=9.81):
        observation, action = {"state": TensorSpec((3,))}, ActionSpec.continuous([-MAX_TORQUE], [MAX_TORQUE])
        self.spec = SimSpec(task, observation, action, LIMIT, 1 / (DT * SUBSTEPS), reports_success=True, snapshots="exact")
        self.gravity = gravity
        self.state = np.zeros((num_envs, 4))  # angle from hanging (rad), velocity (rad/s), mark (rad), steps

    def reset(self, env_ids, seeds, out, options=None):
        for i, seed in zip(env_ids, seeds, strict=True):
            self.state[i] = np.random.default_rng(seed).uniform((-0.5, 0, -1.5, 0), (0.5, 0, 1.5, 0))
            out.observation["state"][i] = self.state[i, :3]

    def step(self, env_ids, actions, out):
        for i, torque in zip(env_ids, np.clip(actions[:, 0], -MAX_TORQUE, MAX_TORQUE).tolist(), strict=True):
            angle, velocity, mark, steps = self.state[i].tolist()
            for _ in range(SUBSTEPS):  # semi-implicit Euler
                load = MASS * self.gravity * LENGTH * np.sin(angle)
                velocity += DT * (torque - load - DAMPING * velocity) / (MASS * LENGTH**2)
                angle += DT * velocity
            self.state[i] = angle, velocity, mark, steps + 1
            out.observation["state"][i] = angle, velocity, mark
            out.reward[i] = 1 - np.tanh(abs(mark - angle) + 0.1 * abs(velocity))
            out.terminated[i], out.truncated[i] = False, steps + 1 >= LIMIT
            out.success[i] = abs(mark - angle) < 0.1 and abs(velocity) < 0.5

    def snapshot(self, env_id):
        return encode_state(self.state[env_id])

    def restore(self, env_id, data):
        self.state[env_id] = decode_state(data)
