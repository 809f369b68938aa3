"""Programs that a model wrote or drives, in processes that see and reach little. `python` runs Python, `box` any command.

The package itself imports nothing: the process that becomes the sandbox loads it, with only the standard library, at every call of a tool.
"""
