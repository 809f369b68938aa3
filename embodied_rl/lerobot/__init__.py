"""embodied_rl policies in LeRobot's commands: the plugin that ``--policy.discover_packages_path=embodied_rl.lerobot`` loads.

    lerobot-eval --policy.discover_packages_path=embodied_rl.lerobot --policy.type=embodied_rl --policy.checkpoint=runs/pusht/… \\
        --env.type=pusht

LeRobot finds the three parts of a policy by the names of their modules: configuration, model, and processing.
"""

from embodied_rl.lerobot.configuration_embodied_rl import EmbodiedRLConfig as EmbodiedRLConfig
