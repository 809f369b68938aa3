"""N ManiSkill environments in one process on PhysX's CPU engine, through ManiSkill's own batched task code.

On a CPU, ManiSkill steps one environment at a time, although its tasks are written for batches; most of a step is Python on tensors of one
row. Here the physics runs scene by scene, and the Python once for all. The numbers equal those of separate environments.

physics   N `PhysxCpuSystem`s with the interface of a `PhysxGpuSystem` (lazy buffers, deferred steps), and ManiSkill's scene over them
structs   ManiSkill's actors, links, articulations, joints and cameras over the N scenes
graft     rows of a batch: kept while others move; new scenes and saved episodes, taken from a separate environment; and one
          environment of the batch as experts and films see it
sim       the task's class with that scene, the SimEnv, and the check that a task is equal here (`maniskill.verdict` remembers it)
"""


class UnsupportedTask(Exception):
    """A task cannot be stepped as a batch; the message says why."""
