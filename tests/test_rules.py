"""Every refusal of `config.rules` by an example: the words of a command line, and what its user reads before anything is started."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from embodied_rl.config.compose import load_train_config
from embodied_rl.config.rules import RULES, WARNINGS, resolve
from embodied_rl.errors import UserError

CARTPOLE = "sim=cartpole hybrid.device=cpu"
GROUPS = f"{CARTPOLE} algorithm=grpo"
OWN_LOSS = f"{CARTPOLE} algorithm.correction.mode=mask"
VLA = "sim=pixel_reach policy=tiny_vla hybrid.device=cpu"
OPENVLA = "sim=pixel_tasks policy=openvla policy.path=. hybrid.device=cpu"
TENSOR_SHARDS = "hybrid.sharding={num_tensor_shards:2}"
EXPERT = "algorithm.recorded.expert=a.b:c"
TEXTS = "sim=frozenlake policy=language algorithm=grpo generation=tokens_torch hybrid.device=cpu"
PROGRAM = TEXTS.replace("frozenlake", "agent_program")
LAKE = "domains.lake={sim:{name:lake,target:a:b}}"
POLE = "domains.pole={sim:{name:pole,target:a:b},policy:{name:actor_critic}}"
DOMAINS = f"{TEXTS} {LAKE} {POLE}"
POLE_BY_PPO = "+algorithm@domains.pole.algorithm=ppo"
ROLLOUTS = " ".join([CARTPOLE, *(f"domains.d{number}={{sim:{{name:pole,target:a:b,num_slots:{number}}}}}" for number in (4, 6))])
MIX = "generation.mix={guest:{share:0.5,backend:random}}"
APART = "hybrid=disaggregated"
LENT = "hybrid=multiplexed hybrid.cluster=ray"
SCORED = "hybrid.reward_worker={target:a.b:c}"
STARTS = "{share:0.5,sources:[best]}"

EXAMPLES = (
    # fixed rollouts
    ("rollouts_of_steps", f"{CARTPOLE} algorithm.advantage=grpo", "needs whole episodes, and algorithm.groups is null"),
    ("one_ratio_for_steps", f"{VLA} algorithm.advantage=gae_action", "set algorithm.ratio=action or token"),
    ("rollout_loss", f"{CARTPOLE} algorithm.loss=gspo", "algorithm.loss='gspo' needs whole episodes ("),
    (
        "old_without_ratio",
        f"{CARTPOLE} algorithm.loss=policy_gradient",
        "has no ratio, so it cannot correct for decisions of older weights",
    ),
    ("weighed_normalisation", f"{OWN_LOSS} algorithm.normalize_advantage=minibatch", "set algorithm.normalize_advantage=batch"),
    ("rollout_reward", f"{CARTPOLE} algorithm.reward.std=batch", "algorithm=ppo learns from fixed rollouts or stored steps"),
    ("cloned_reward", f"{CARTPOLE} algorithm=bc {EXPERT} algorithm.reward.scale=2", "uses neither rewards nor success"),
    ("cloned_reward", f"{CARTPOLE} algorithm=bc {EXPERT} algorithm.critic_warmup=2", "uses neither rewards nor success"),
    (
        "initialized_ahead",
        f"{CARTPOLE} {APART} algorithm.max_staleness=1 algorithm.initialized={STARTS}",
        "so the clock would choose: set algorithm.max_",
    ),
    ("cloned_reward", f"{CARTPOLE} algorithm=bc {EXPERT} algorithm.initialized={STARTS}", "uses neither rewards nor success"),
    ("initialized_unplayed", f"{CARTPOLE} algorithm=iql {EXPERT} algorithm.initialized={STARTS}", "algorithm=iql plays none"),
    (
        "minibatch_of_a_rollout",
        f"{CARTPOLE} sim.num_slots=4 algorithm.rollout_steps=8 algorithm.minibatch_size=33",
        "algorithm.minibatch_size must be <= sim.num_slots * algorithm.rollout_steps (32), got 33.",
    ),
    (
        # Of 4 and 6 slots that share a policy an update learns from 5 * 8 decisions each: of 10 and 7 steps, rounded.
        "minibatch_of_a_rollout",
        f"{ROLLOUTS} algorithm.rollout_steps=8 algorithm.minibatch_size=83",
        "algorithm.minibatch_size must be <= sim.num_slots * algorithm.rollout_steps (82), got 83.",
    ),
    # whole episodes
    (
        "rollout_staleness",
        f"{GROUPS} algorithm.max_staleness=1 algorithm.groups.max_staleness=2",
        "max_staleness=1 contradicts algorithm.gr",
    ),
    (
        "critic_warmup",
        f"{GROUPS} algorithm.critic_warmup=3",
        "critic_warmup=3 trains only the critic at first, and algorithm.advantage='grpo' has no critic",
    ),
    ("group_of_one", f"{GROUPS} algorithm.groups.group_size=1", "compares the episodes of a group, and algorithm.groups.group_size is 1"),
    ("group_of_one", f"{GROUPS} algorithm=remax algorithm.groups.group_size=1", "advantage='remax' compares the episodes of a group"),
    ("loss_of_demonstrations", f"{GROUPS} algorithm.loss=behaviour_cloning", "learns from demonstrations"),
    ("advantage_of_its_own", f"{GROUPS} algorithm.loss=gpg", "set algorithm.advantage=gpg, not 'grpo'"),
    (
        "advantage_of_its_own",
        f"{GROUPS} algorithm.loss=ipa algorithm.loss_options.max_mismatch=2",
        "set algorithm.advantage=ipa, not",
    ),
    ("kl_without_gradient", f"{GROUPS} algorithm.kl={{coef:0.1,kind:k1}}", "set algorithm.kl.kind=k2 or k3, or algorithm.kl.place=reward"),
    ("anchor_similarity", f"{CARTPOLE} algorithm.anchor_similarity=0.9", "algorithm.advantage='gae' does not use the comparison"),
    ("anchor_similarity", f"{GROUPS} algorithm.anchor_similarity=0.9", "algorithm.advantage='grpo' does not use the comparison"),
    (
        "stale_without_ratio",
        f"{GROUPS} algorithm.loss=policy_gradient algorithm.groups.max_staleness=1",
        "has no ratio, so it cannot correct for episodes of older weights",
    ),
    ("aggregation_horizon", f"{GROUPS} algorithm.horizon=9", "got aggregation=None and horizon=9"),
    ("aggregation_horizon", f"{CARTPOLE} algorithm.aggregation=seq-mean-token-sum-norm", "and horizon=None"),
    ("adapted_from_zero", f"{GROUPS} algorithm.kl.target=0.1", "set algorithm.kl.coef above 0"),
    # divergence
    ("updates_of_stored", f"{CARTPOLE} algorithm=iql algorithm.correction.mode=clamp", "algorithm=iql has none: leave them out"),
    ("updates_of_stored", f"{CARTPOLE} algorithm=bc {EXPERT} algorithm.adjust_batch=delete", "algorithm=bc has none: leave them out"),
    ("kl_of_recordings", f"{CARTPOLE} algorithm=iql algorithm.kl.coef=0.1", "its objective already keeps the policy near"),
    # recordings
    ("unbounded_sac", f"{CARTPOLE} algorithm=sac policy.distribution=gaussian", "set policy.distribution=squashed"),
    ("fixed_noise_sac", "sim=pendulum policy=flow policy.method=flow_sde algorithm=sac hybrid.device=cpu", "set policy.method=flow_noise"),
    (
        "recorded_sac",
        f"{CARTPOLE} algorithm=iql algorithm.off_policy.update=sac policy.distribution=squashed",
        "set algorithm.off_policy.update=iql or awac",
    ),
    (
        "share_of_nothing_fresh",
        f"{CARTPOLE} algorithm=iql algorithm.off_policy.recorded_share=0.5",
        "recorded_share=0.5 mixes recorded steps with fresh ones",
    ),
    ("recording_unused", f"{CARTPOLE} recording=[somewhere]", "algorithm=ppo learns only from actions that its own policy sampled"),
    # agent programs
    ("program_without_words", "sim=agent_program algorithm=grpo", "set policy=language"),
    # language agents
    ("agent_without_groups", f"{TEXTS} algorithm=ppo", "learns from whole episodes, and algorithm=ppo does not"),
    ("agent_critic", f"{TEXTS} algorithm=ppo_episodes", "algorithm.advantage='gae' needs a critic"),
    ("agent_tokens", f"{TEXTS} generation=random", "generation.backend='random' does not sample tokens"),
    ("agent_player", f"{TEXTS} algorithm.warm_start={{episodes:1}}", "algorithm.warm_start of a language agent clones a scripted player"),
    (
        "initialized_tools",
        f"{TEXTS} algorithm.initialized.share=0.5 agent.tools=[calculator]",
        "the state of tools (variables, files, calls) cannot be saved",
    ),
    ("program_initialized", f"{PROGRAM} algorithm.initialized.share=0.5", "the state of an agent program cannot be saved"),
    # robots
    ("robot_tokens", f"{GROUPS} generation=tokens_torch", "generation.backend='tokens_torch' samples tokens"),
    ("robot_player", f"{CARTPOLE} algorithm.warm_start={{player:x}}", "algorithm.warm_start.player=x answers in text"),
    ("warm_start_of_cloning", f"{CARTPOLE} algorithm=bc algorithm.warm_start={{episodes:1}}", "algorithm=bc is cloning already"),
    ("small_without_chunks", f"{CARTPOLE} algorithm.ratio=action", "need a policy that acts in chunks"),
    ("small_without_chunks", f"{TEXTS} algorithm.advantage=gae_chunk policy.value_head=mlp", "need a policy that acts in chunks"),
    ("small_head_learning_rate", f"{GROUPS} algorithm.head_learning_rate=1", "policy.name='actor_critic' has none: set it to null"),
    ("small_head_learning_rate", "algorithm.head_learning_rate=1", "policy.name='actor_critic' has none: set it to null"),
    ("no_model_folder", "sim=pixel_tasks policy=openvla policy.path=nowhere", "policy.path='nowhere' is not a folder"),
    ("no_probabilities", "sim=pixel_tasks policy=openvla_oft policy.path=. policy.head=l1", "set policy.head=discrete"),
    ("headless_critic", f"{OPENVLA} policy.value_head=false", "algorithm=ppo needs a critic, and policy.value_head=false has none"),
    ("headless_critic", f"{OPENVLA} policy.value_head=false algorithm=iql {EXPERT}", "algorithm=iql needs a critic"),
    ("no_tensor_plan", f"{VLA} {TENSOR_SHARDS}", "and policy.name='tiny_vla' has none: set it to 1, and use num_shards"),
    ("tensor_shards_of_adapters", f"{TEXTS} {TENSOR_SHARDS} policy.lora_rank=2", "policy.lora_rank=2 adds LoRA to all of them"),
    ("nothing_recorded", f"{CARTPOLE} algorithm=iql {EXPERT} record.share=0.5", "record.share=0.5: algorithm=iql plays no episodes"),
    ("values_of_stored", f"{VLA} policy.value=action algorithm=iql", "set policy.value=chunk"),
    ("values_of_steps", f"{VLA} policy.value=action", "got policy.value=action and algorithm.advantage=gae."),
    (
        "values_of_steps",
        f"{VLA} algorithm.advantage=gae_action algorithm.ratio=action",
        "got policy.value=chunk and algorithm.advantage=gae_action.",
    ),
    (
        "chunks_of_one",
        f"{VLA} policy.chunk=1 algorithm.advantage=gae_chunk",
        "'tiny_vla' has chunks of one step: set algorithm.advantage=gae",
    ),
    # several domains
    ("domains_recording", f"{DOMAINS} recording=[x]", "recording=x has episodes of one task, and this run has several domains"),
    ("robot_player", f"{DOMAINS} domains.pole.algorithm.warm_start={{player:x}}", "algorithm.warm_start.player=x answers in text"),
    ("domain_name", f"{DOMAINS} domains.language={{sim:{{name:x,target:y}}}}", "none of 'language', 'shared' and 'roles'"),
    ("domain_backend", f"{DOMAINS} domains.pole.backend=vllm", "domains.pole.policy computes batches of actions: leave"),
    ("mix_in_no_text", f"{DOMAINS} {MIX[:-2]},domains:[pole]}}}}", "generation.mix.guest.domains: 'pole' is not a text domain"),
    ("mix_without_text", f"{GROUPS} {POLE} {MIX}", "generation.mix.guest plays text domains, and this run has none"),
    ("mix_without_actions", f"{TEXTS} {MIX}", "backend=random draws one of agent.actions, and domain 'frozenlake' lists none"),
    # evaluation and checkpoints
    (
        "return_never_measured",
        f"{CARTPOLE} stop_at_return=1 evaluation.every_steps=null",
        "stop_at_return=1 needs evaluations during the run",
    ),
    (
        "nothing_drawn",
        f"{CARTPOLE} evaluation.temperature=0.5",
        "applies to action tokens (tiny_vla, openvla, openvla_oft), and policy.name=actor_critic",
    ),
    (
        "within_ahead",
        f"{GROUPS} {APART} algorithm.groups.max_staleness=1 checkpoint.within_episodes=true",
        "with algorithm.groups.max_staleness=1 no run repeats exactly",
    ),
    (
        "within_ahead",
        f"{CARTPOLE} hybrid=multiplexed algorithm.max_staleness=1 checkpoint.within_episodes=true",
        "with hosts which slots share a forward pass",
    ),
    # reward workers
    ("scored_rollouts", f"{CARTPOLE} {SCORED}", "choose a method with groups (algorithm=grpo"),
    # staleness
    (
        "stale_recordings",
        f"{CARTPOLE} algorithm=iql {EXPERT} algorithm.max_staleness=1",
        "and algorithm=iql plays nothing: set algorithm.max_staleness=0",
    ),
    ("stale_in_turns", f"{CARTPOLE} algorithm.max_staleness=1 hybrid.offload=[simulators]", "or set algorithm.max_staleness=0."),
    (
        "stale_in_turns",
        f"{GROUPS} {APART} algorithm.groups.max_staleness=1 hybrid.offload=[kv_cache]",
        "offloads the simulators or the KV cache then",
    ),
    (
        "stale_in_turns",
        f"{DOMAINS} {POLE_BY_PPO} algorithm.groups.max_staleness=1 hybrid.offload=[simulators]",
        "or set algorithm.groups.max_staleness=0.",
    ),
    # placement
    (
        "pipeline_stages",
        f"{CARTPOLE} hybrid.placement={{kind:hybrid,num_pipeline_stages:4}} sim.pipeline_groups=2",
        "num_pipeline_stages=4 contradicts sim.pipeline_groups=2",
    ),
    ("shared_gpus", f"{TEXTS} {LENT} hybrid.ray.gpus={{generation:1,train:1}}", "Set generation=0.5 and train=0.5."),
    (
        "divided_gpus",
        f"{CARTPOLE} hybrid=ray hybrid.sharding={{num_shards:2}} hybrid.ray.gpus.train=1",
        "cannot be divided evenly among 2 ranks (hybrid.sharding), which need whole GPUs: set hybrid.ray.gpus.train=2",
    ),
    (
        "recordings_multiplexed",
        f"{CARTPOLE} hybrid=multiplexed algorithm=bc {EXPERT}",
        "algorithm=bc learns from recordings and plays nothing: set hybrid=collocated.",
    ),
    ("apart_offload", f"{CARTPOLE} hybrid=ray hybrid.offload=[gradients]", "offloading from them gains nothing: leave parameters,"),
    # players
    ("players_of_one_process", f"{GROUPS} hybrid.players=2", "with hybrid.placement=collocated one player has all slots"),
    ("players_of_one_process", f"{GROUPS} hybrid=multiplexed hybrid.players=2", "set hybrid.players=1, or one of these"),
    (
        "idle_players",
        f"{CARTPOLE} {APART} sim.num_slots=2 algorithm.minibatch_size=64 hybrid.players=3",
        "is more than sim.num_slots=2, and each player needs at least one of the slots",
    ),
    ("players_of_one_process", f"{GROUPS} {LENT} hybrid.players=2", "with hybrid.placement=multiplexed one player has all slots"),
    (
        "idle_players",
        f"{DOMAINS} {APART} {MIX[:-2]},num_slots:2}}}} hybrid.players=4 agent.actions=[up]",
        "more than generation.mix.guest.num_slots=2, and each",
    ),
    (
        "idle_players",
        f"{GROUPS} {APART} algorithm.groups.groups_per_step=4 hybrid.players=5",
        "groups_per_step=4, and each player needs at least one of the groups: set hybrid.players=4.",
    ),
    # weights that are sent
    ("nothing_sent", f"{GROUPS} hybrid.publish=changed", "this run sends none: set hybrid.publish=full, or hybrid=disaggregated"),
    ("no_adapter", f"{GROUPS} {APART} hybrid.publish=adapter", "or hybrid.publish=changed"),
    ("no_adapter", f"{TEXTS} {APART} hybrid.publish=adapter", "policy.lora_rank=8"),
)
ON_GPUS = (
    ("", 4, f"{CARTPOLE} hybrid.placement={{env:[0/cpu],generation:[0/gpu:0],train:[0/gpu:1-2]}}", "hybrid.sharding.num_shards=2"),
    (
        "too_few_gpus",
        2,
        f"{CARTPOLE} hybrid=fsdp2 hybrid.placement=disaggregated",
        "a GPU for each player (1) and one for each of 2 training ranks",
    ),
    ("", 1, f"{CARTPOLE} {APART}", "needs at least 2 GPUs, and 'this machine' has 1"),
)


@pytest.mark.parametrize(("name", "words", "message"), EXAMPLES, ids=[f"{name}-{index}" for index, (name, _, _) in enumerate(EXAMPLES)])
def test_refused(name: str, words: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(load_train_config(words.split()))
    told = str(refused.value)
    assert message in told
    assert "\n" not in told
    assert len(told) <= 400


@pytest.mark.parametrize(("name", "count", "words", "message"), ON_GPUS)
def test_refused_with_gpus(monkeypatch: pytest.MonkeyPatch, name: str, count: int, words: str, message: str) -> None:
    """The counts are made up: machines with so many GPUs are what this is about."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(UserError) as refused:
        resolve(load_train_config([*words.split(), "hybrid.device=cuda"]))
    assert message in str(refused.value)


def test_every_rule_has_an_example_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in (*RULES, *WARNINGS)]
    assert len(set(names)) == len(names)
    assert {name for name, _, _ in EXAMPLES} | {name for name, *_ in ON_GPUS if name} == {rule.name for rule in RULES}


def test_the_page_says_of_every_rule_why_it_stays() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("## What is refused, and why\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (mathematics|simulator|reproducibility|meaning|machine|file format|missing) \| (.+) \|$", table, re.M)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(names) == sorted(rule.name for rule in RULES)


def test_a_run_says_that_its_answers_are_not_drawn_from_what_it_trains() -> None:
    for words in ("agent.temperature=0", "agent.top_k=5", "agent.top_p=0.9"):
        with pytest.warns(UserWarning, match="the policy's gradient is biased"):
            resolve(load_train_config(f"{TEXTS} {words}".split()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve(load_train_config(f"{TEXTS} agent.evaluation_temperature=0.5 agent.temperature=0.7".split()))


def test_a_run_says_that_its_divergence_is_not_from_where_it_starts() -> None:
    start = "algorithm.warm_start={player:embodied_rl.sim.text.frozenlake:player}"
    with pytest.warns(UserWarning, match="compares a policy with LoRA with its model alone"):
        resolve(load_train_config(f"{TEXTS} {start} policy.lora_rank=2 algorithm.kl.coef=0.1".split()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for good in (f"{start} algorithm.kl.coef=0.1", f"{start} policy.lora_rank=2", "policy.lora_rank=2 algorithm.kl.coef=0.1"):
            resolve(load_train_config(f"{TEXTS} {good}".split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{GROUPS} algorithm.value_clip=0.2", "has no critic"),
        (f"{GROUPS} algorithm.reward.overlong_tokens=9", "a language agent's answers"),
        (f"{CARTPOLE} agent.temperature=0.5", "agent.* has no effect"),
        (f"{CARTPOLE} hybrid.ray.gpus.train=1", "hybrid.ray.* has no effect"),
    ],
)
def test_a_run_says_which_options_have_no_effect(words: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        resolve(load_train_config(words.split()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for good in (f"{CARTPOLE} algorithm.value_clip=0.2", f"{TEXTS} algorithm.reward.overlong_tokens=9"):
            resolve(load_train_config(good.split()))


def test_names_that_nothing_has_are_refused() -> None:
    for words, message in (
        (f"{GROUPS} algorithm.advantage=grpoo", "Did you mean 'grpo'"),
        (f"{GROUPS} algorithm.loss=ppo", "Loss 'ppo' is not known"),
        (f"{GROUPS} algorithm.loss=decoupled_ppo", "'decoupled_ppo' needs algorithm.loss_options.weight_high"),
        (f"{CARTPOLE} algorithm=bc recording=[nowhere]", "nowhere"),
        (f"{CARTPOLE} algorithm=bc", "expert"),
        (f"{CARTPOLE} hybrid.placement={{env:[1/cpu],generation:[0/cpu],train:[0/cpu]}}", "Device '1/cpu' does not exist"),
        (f"{GROUPS} hybrid.placement={{kind:multiplexed,num_train_gpus:2}}", "lends 2 of 2 hosts"),
        (f"{GROUPS} {LENT} hybrid.placement={{kind:multiplexed,num_train_gpus:2}}", "Nearest valid choice: num_hosts=3"),
        (f"{CARTPOLE} hybrid.placement={{env:[0/cpu],generatoin:[0/cpu],train:[0/cpu]}}", "Did you mean 'generation'"),
        (f"{CARTPOLE} hybrid.placement={{env:[0/cpu],generation:[0/cpu]}}", "lacks train"),
        (
            f"{CARTPOLE} hybrid.device=cpu hybrid.placement={{env:[0/cpu],generation:[0/gpu:0],train:[0/cpu]}}",
            "with hybrid.device=cpu' has",
        ),
        (f"{DOMAINS} domains.pole.algorithm.advantage=gpro", "Did you mean 'grpo'"),
        (f"algorithm=ppo {POLE} +algorithm@domains.pole.algorithm=grpo", "choose algorithm=grpo or the like for the run"),
    ):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            resolve(load_train_config(words.split()))


def test_one_key_says_how_old_experience_may_be() -> None:
    for words in ("algorithm.max_staleness=2", "algorithm.max_staleness=2 algorithm.groups.max_staleness=2"):
        algorithm = resolve(load_train_config(f"{GROUPS} {APART} {words}".split())).algorithm
        assert algorithm.groups is not None
        assert (algorithm.max_staleness, algorithm.groups.max_staleness) == (0, 2)
    with pytest.raises(UserError, match=r"algorithm\.groups\.max_staleness=2 no run repeats exactly"):
        resolve(load_train_config(f"{GROUPS} {APART} algorithm.max_staleness=2 checkpoint.within_episodes=true".split()))


def test_the_stages_of_a_placement_are_the_groups_of_its_simulators() -> None:
    stages = "hybrid.placement={kind:hybrid,num_pipeline_stages:4}"
    assert resolve(load_train_config([*CARTPOLE.split(), stages])).sim.pipeline_groups == 4
    domains = resolve(load_train_config([*ROLLOUTS.split(), "domains.d6.sim.pipeline_groups=4", stages])).domains
    assert {name: domain.sim.pipeline_groups for name, domain in domains.items()} == {"d4": 4, "d6": 4}
    with pytest.raises(UserError, match=r"sim\.pipeline_groups must be <= sim\.num_slots \(2\), got 4"):
        resolve(load_train_config([*CARTPOLE.split(), stages, "sim.num_slots=2"]))


def test_a_run_with_players_has_its_simulator_for_its_only_domain() -> None:
    config = resolve(
        load_train_config([*TEXTS.split(), "video.enabled=no", MIX, "agent.actions=[up]", "algorithm.warm_start={player:a:b}"])
    )
    assert list(config.domains) == ["frozenlake"]
    assert config.domains["frozenlake"].sim == config.sim
    assert config.for_domain("frozenlake").algorithm.warm_start is not None


def test_what_has_no_effect_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"because no episode may use older weights\. Set algorithm\.groups\.max_staleness=1"):
        config = resolve(load_train_config([*GROUPS.split(), "hybrid=multiplexed"]))
    assert config.hybrid.num_threads is not None, "the threads of the hosts that are lent"
