"""N ManiSkill environments in one process on PhysX's CPU engine, through ManiSkill's own batched task code.

ManiSkill steps one environment at a time on a processor, though its tasks are written for batches; most of a step is Python on tensors of
one row. Here the physics runs scene by scene and the Python once for all. The numbers are those of environments by themselves.

    physics   N `PhysxCpuSystem`s in the shape of a `PhysxGpuSystem`: lazy buffers, deferred steps
    scene     ManiSkill's scene over them
    structs   ManiSkill's actors, links, articulations, joints and cameras over the N scenes
    env       the task's class with that scene: resets row by row, steps of some rows
    rows      attributes of Python row by row
    graft     a scene built anew, and saved episodes, through an environment by itself
    views     one environment of the batch, as experts and films see it
    sim       the SimEnv
    check     is a task equal here? asked once, and remembered by `maniskill_verdicts`
"""


class UnsupportedTask(Exception):
    """A task that cannot be stepped as a batch; the message says why."""
