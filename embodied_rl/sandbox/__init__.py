"""Programs that a model wrote or drives, in processes with few rights: `box.run_program` runs Python, `box.Sandboxed` any command.

The package itself imports nothing: every call of a tool loads it in the sandbox's process, with only the standard library.
"""
