"""N ManiSkill environments in one process on PhysX's CPU engine, through ManiSkill's own batched task code.

ManiSkill steps one environment at a time on a processor, though its tasks are written for batches; most of a step is Python on tensors of
one row. Here the physics runs scene by scene and the Python once for all. The numbers are those of environments by themselves.

    physics   N `PhysxCpuSystem`s in the shape of a `PhysxGpuSystem` (lazy buffers, deferred steps), and ManiSkill's scene over them
    structs   ManiSkill's actors, links, articulations, joints and cameras over the N scenes
    graft     rows of a batch: kept while others move; a scene built anew, and saved episodes, through an environment by itself; and one
              environment of the batch, as experts and films see it
    sim       the task's class with that scene, the SimEnv, and whether a task is equal here (asked once; `maniskill.verdict` remembers)
"""


class UnsupportedTask(Exception):
    """A task that cannot be stepped as a batch; the message says why."""
