"""The plan that `serve` and `train` take when none is given: the best for the machines that are here, and why."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tllm.api.engine_options import EngineOptions
from tllm.cli.arguments.survey_settings import serving_settings, training_settings, within
from tllm.cli.display.beside_steps import BesideSteps, PredictedPlan
from tllm.cli.display.serving_plans import advice, certainty, drafting, given_serving, pace
from tllm.cli.display.training_plans import (
    given_training,
    has_value_pass,
    left_out,
    not_predicted,
    not_timed,
    roles_elsewhere,
    seconds_by_role,
)
from tllm.cli.planning.role_outcome import predicted_roles
from tllm.cli.planning.role_wishes import taught_of, wishes_of
from tllm.cluster.settings import OUR_LINKS, EngineSettings, PredictedSeconds, SurveySettings
from tllm.core.errors import CapacityError, PlanError, counted
from tllm.core.memory import amount
from tllm.node.coordinator.cluster_options import DEFAULTS
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import DEFAULT_CACHE_BYTES
from tllm.planner.cost.rank_bytes import RankBytes, rank_bytes
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.cost.stage_team import ServingMemory
from tllm.planner.measured.survey import FILE, Goal, Survey, cluster_of, digest, read_survey
from tllm.planner.roles.role_machines import RoleChoice, RolesAsked, RoleWish, role_choices, taught_seconds
from tllm.planner.roles.teacher_machines import teaching_seconds
from tllm.planner.search.serving_search import ServingChoice, ServingSearchResult, best_serving
from tllm.planner.search.training_constraints import MICROBATCHES, TrainingConstraints
from tllm.planner.search.training_search import TrainingChoice, TrainingSearchResult, best_training
from tllm.planner.simulate.explain import serving_bottleneck, stage_names, training_bottleneck
from tllm.planner.simulate.forward_passes import as_predicted
from tllm.planner.simulate.placed_plan import PlacedPlan
from tllm.planner.simulate.training_step import StepPrediction
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import RoleName
from tllm.training.job.initial_model import judge_specs, row_lengths
from tllm.training.job.job_file import DEFAULT, ResolvedJob
from tllm.training.job.job_parts import role_nodes, shares_prompts, training_facts, with_role_nodes, with_role_plans
from tllm.training.job.key_limits import ALONE

if TYPE_CHECKING:
    from tllm.node.coordinator.plan_selection import PlanChoice
    from tllm.node.coordinator.survey import SurveyRequest
    from tllm.node.coordinator.workload import Workload


Found = TypeVar("Found")

NO_WISHES: Mapping[RoleName, RoleWish] = MappingProxyType({})


class PlanChooser(ABC):
    """Chooses a plan by a survey of the machines.

    With a folder the survey is saved there: it is used again for the same machines, and each run corrects it. A plan
    that is `given` is only predicted."""

    def __init__(self, spec: ModelSpec, goal: Goal, folder: Path | None, nodes: int, given: Plan | None = None) -> None:
        self.spec, self.goal, self.given = spec, goal, given
        self.nodes = given.world_size if given else nodes
        self.path = folder / FILE if folder is not None else None
        self.known = read_survey(self.path) if self.path is not None else None
        self.survey: Survey | None = None
        self.refused = set[str]()  # plans that could not be started
        self.says: Callable[[str], None] = partial(print, flush=True)

    def choice(self) -> PlanChoice:
        """What a cluster is opened with."""
        from tllm.node.coordinator.plan_selection import PlanChoice

        return PlanChoice(self.asked(), self, self.given is not None)

    def asked(self) -> SurveyRequest:
        """What is to be measured, unless the saved survey has it."""
        from tllm.node.coordinator.survey import SurveyRequest

        return SurveyRequest(self.spec, self.goal, self.settings(), self.known)

    @abstractmethod
    def settings(self) -> SurveySettings:
        """What nodes are to measure."""

    @abstractmethod
    def __call__(self, survey: Survey) -> tuple[Workload, tuple[int, ...]]:
        """The work, and for each rank the index of its node in the survey."""

    def recalled(self) -> Survey | None:
        """The saved survey, if it is of this model and of as many nodes."""
        known, asked = self.known, self.settings()
        if known is None or (known.model, known.goal, known.dtype) != (digest(self.spec), self.goal, asked.dtype):
            return None
        if not known.has_measured(bool(asked.rollouts), asked.intra_host):
            return None
        return known if len(known.nodes) == self.nodes else None

    def how(self, exact: bool, steps: int) -> str:
        """How the plan was found, in words."""
        return "as given" if self.given else certainty(exact, steps)

    def keep(self, survey: Survey) -> None:
        """Choose by this survey from here on, and save it if it is new."""
        self.survey = survey
        if self.path is not None and survey is not self.known:
            survey.save(self.path)


class ServingChooser(PlanChooser):
    """Chooses the plan to serve with."""

    def __init__(
        self,
        options: EngineOptions,
        facts: ServingFacts,
        folder: Path | None,
        nodes: int,
        given: Plan | None = None,
        leave_out: bool = True,
    ) -> None:
        super().__init__(options.spec, "serve", folder, nodes, given)
        self.leave_out = leave_out
        facts = dataclasses.replace(within(facts, options.max_model_len), max_num_seqs=options.max_num_seqs)
        self.options, self.facts = options, facts
        self.chosen: ServingChoice | None = None
        self.cache_tokens = 0
        """Tokens that the engine made room for in its cache, once a plan was chosen."""

    def settings(self) -> SurveySettings:
        asked = serving_settings(self.facts, self.nodes)
        return msgspec.structs.replace(asked, intra_host=self.options.wiring.intra_host)

    def __call__(self, survey: Survey) -> tuple[Workload, tuple[int, ...]]:
        from tllm.api.engine_options import engine_config
        from tllm.api.open_engine import cluster_options
        from tllm.node.serve.open_cluster import serving_workload

        best = self.decide(survey)
        cluster = cluster_of(survey, self.spec)
        options = self.options
        ranks = rank_bytes(self.spec, best.plan, options.dtype, options.kv_cache_dtype)
        room = min(
            self._room(cluster.devices[device].memory, memory, rank)
            for device, memory, rank in zip(best.devices, best.predicted.memory, ranks, strict=True)
        )
        if self.given is None and options.kv_cache_memory is None and room < DEFAULT_CACHE_BYTES:
            options = dataclasses.replace(options, kv_cache_memory=room)
        work = serving_workload(
            options.folder, best.plan, engine_config(options), cluster_options(options), hub=options.hub
        )
        assert isinstance(work.settings, EngineSettings), "serving"
        self.cache_tokens = work.settings.num_pages * work.settings.page_size
        return work, best.devices

    def _room(self, has: int, memory: ServingMemory, rank: RankBytes) -> int:
        """Bytes that are left for the model's cache on a device that has so many; a draft model's cache, which has as
        many tokens, gets its part."""
        left, own = int(has - memory.total) + memory.cache, rank.kv_per_token * self.facts.cached_tokens
        return left * own // memory.cache if own else left

    def decide(self, survey: Survey) -> ServingChoice:
        """Choose by a survey, save it, and print what was chosen and why."""
        self.keep(survey)
        cluster = cluster_of(survey, self.spec)
        result = given_serving(self.given, self.spec, cluster, self.facts) if self.given else self._search(cluster)
        best = self.chosen = result.choices[0] if self.given else self._best(cluster, result)
        predicted, names = best.predicted, stage_names(best.plan, cluster, best.devices)
        most = max(rank.total for rank in predicted.memory)
        lines = [
            f"plan {best.plan} on {' '.join(names)}, {self.how(result.exact, result.steps)}",
            f"predicted: {pace(predicted)}, {amount(most)} at most on a node "
            f"({counted(self.facts.prompt, 'token')} in, {self.facts.reply} out, {self.facts.concurrency} at once)",
            *drafting(predicted.load),
            f"the time goes to {serving_bottleneck(predicted, names)}",
            *([] if self.given else advice(cluster, result, best)),
        ]
        self.says("\n".join(lines))
        return best

    def best(self, cluster: Cluster) -> ServingChoice:
        """What would be chosen for these machines."""
        return self._best(cluster, self._search(cluster))

    def _search(self, cluster: Cluster) -> ServingSearchResult:
        result = best_serving(self.spec, cluster, self.facts)
        choices = tuple(choice for choice in result.choices if str(choice.plan) not in self.refused)
        if not choices:
            raise PlanError("no plan is left that could begin", "the log says why each one could not")
        return dataclasses.replace(result, choices=choices)

    def _best(self, cluster: Cluster, result: ServingSearchResult) -> ServingChoice:
        return result.choices[0] if self.leave_out else _on_all_nodes(cluster, result)


def _on_all_nodes(cluster: Cluster, result: ServingSearchResult) -> ServingChoice:
    """The best plan on which every node computes."""
    for choice in result.choices:
        if len(choice.devices) == len(cluster):
            return choice
    most = max(len(choice.devices) for choice in result.choices)
    raise PlanError(
        f"no plan was found that uses all {len(cluster)} nodes; the largest uses {most}",
        "leave some out (--leave-out auto), or give --plan",
    )


class TrainingChooser(PlanChooser):
    """Chooses the plan and, where the job does not say it, the size of microbatches."""

    def __init__(
        self,
        resolved: ResolvedJob,
        config: str,
        spec: ModelSpec,
        nodes: int,
        given: Plan | None = None,
        mirrored: bool = False,
    ) -> None:
        super().__init__(spec, "train", Path(resolved.job.output_dir), nodes, given)
        self.mirrored = mirrored  # whether snapshots of ranks are kept, so that the run survives their loss
        self.resolved, self.config = resolved, config
        self.wiring, self.cluster = OUR_LINKS, DEFAULTS  # as the command line asks for them
        self.chosen: TrainingChoice | None = None
        self.roles: RoleChoice | None = None
        """Who does what, where the job gives roles to nodes and it was chosen."""
        self._judges, self._lengths = judge_specs(resolved.job), row_lengths(resolved.job)
        self._beside = BesideSteps.of(resolved.job, spec, self._lengths)

    def settings(self) -> SurveySettings:
        job = self.resolved.job
        asked = training_settings(self.facts(apart=()), self._sizes(), job.optimizer, self.nodes)
        return msgspec.structs.replace(asked, intra_host=self.wiring.intra_host)

    def __call__(self, survey: Survey) -> tuple[Workload, tuple[int, ...]]:
        from tllm.node.train.training_work import TrainingWork

        chosen = self.decide(survey)
        placed, predicted = chosen.placed, self.predicted_seconds(chosen.placed, chosen.predicted)
        work = TrainingWork(self.resolved, placed.plan, self.config, self.wiring, predicted)
        return work.workload(self.cluster), placed.devices

    def decide(self, survey: Survey) -> TrainingChoice:
        """Choose by a survey, save it, and print what was chosen and why."""
        self.keep(survey)
        cluster = cluster_of(survey, self.spec)
        how, beside = self._choose(cluster)
        best = self.chosen
        assert best is not None, "it was chosen"
        placed, predicted = best.placed, best.predicted
        job = dataclasses.replace(self.resolved.job, microbatch_size=placed.facts.microbatch_size)
        self.resolved = dataclasses.replace(self.resolved, job=job)
        names = [cluster.name(device) for device in placed.devices]
        lines = [
            f"plan {placed.plan} with microbatches of {job.microbatch_size} on {' '.join(names)}, {how}",
            *beside,
            f"predicted: {predicted.seconds:.3g} s a step, {predicted.tokens_per_second:,.0f} tokens/s, "
            f"{amount(max(rank.total for rank in best.memory))} at most on a rank",
            *seconds_by_role(predicted),
            *not_timed(placed.facts, predicted),
            *not_predicted(job),
            *self.beside_steps(placed),
            f"the time goes to {training_bottleneck(predicted)}",
            *([] if self.given or beside else left_out(cluster, best)),
        ]
        self.says("\n".join(lines))
        return best

    def beside_steps(self, placed: PlacedPlan) -> list[str]:
        """Lines that say what a plan takes beside the steps: a reference before the first, evaluations."""
        return self._beside.lines(self._asked(placed))

    def best(
        self, cluster: Cluster, sizes: tuple[int, ...] = (), top: int = 1, facts: TrainingFacts | None = None
    ) -> TrainingSearchResult:
        """The best of all plans that the job allows, with microbatches of these sizes or of those that it allows.

        Rank 0 is on the machine that has the data, and with it a teacher that is beside the student. `facts` are the
        job's, unless they are given.
        """
        constraints = TrainingConstraints(sizes or self._sizes(), 0, self._refuse)
        return best_training(self.spec, cluster, facts or self.facts(), top, constraints=constraints)

    def best_with_roles(
        self, cluster: Cluster, sizes: tuple[int, ...] = (), others: Mapping[RoleName, RoleWish] = NO_WISHES
    ) -> list[RoleChoice]:
        """The best plan for each choice of machines for the roles that the job gives to nodes, and for these `others`,
        the fastest first."""
        job, facts = self.resolved.job, self._all_facts()
        wishes = {**others, **wishes_of(cluster, job)}
        asked = RolesAsked(self.spec, facts, wishes, taught_of(job, facts))
        return role_choices(cluster, asked, lambda part, own: self.best(part, sizes, facts=own).choices[0])

    def _all_facts(self) -> TrainingFacts:
        """Of all roles, with the plans by which nodes divide their models."""
        return with_role_plans(self.resolved.job, self.facts(apart=()), self.spec)

    def best_as_chosen(self, cluster: Cluster, sizes: tuple[int, ...]) -> TrainingChoice:
        """The best plan for machines as they are now, where each role stays on the machines that were chosen for it."""
        if role_nodes(self.resolved.job):
            return self.best_with_roles(cluster, sizes)[0].training
        return self.best(cluster, sizes).choices[0]

    def _choose(self, cluster: Cluster) -> tuple[str, list[str]]:
        """Choose the plan, and the nodes for the job's roles, which it names from here on. How, in words, and who has
        which role."""
        roles = role_nodes(self.resolved.job)
        if not roles or self.given:
            result = self.predicted(cluster) if self.given else self._that_fits(lambda: self.best(cluster))
            self.chosen = result.choices[0]
            return self.how(result.exact, result.steps), []
        choices = self._that_fits(lambda: self.best_with_roles(cluster))
        best, self.chosen = choices[0], choices[0].training
        job, said = self.resolved.job, list[str]()
        for role, devices in best.by_role.items():
            if role in roles:
                names = [cluster.name(device) for device in devices]
                plan = str(best.plans.get(role, ALONE))
                job = with_role_nodes(job, role, names, plan)
                takes = f"{best.seconds_by_role[role]:.3g} s a step, {amount(best.held[role])} on each"
                by = f"by {plan}, " if plan != ALONE else ""
                said.append(f"{role}: {' '.join(names)} ({by}{takes})" if names else f"{role}: none apart")
        self.resolved, self.roles = dataclasses.replace(self.resolved, job=job), best
        told = f"{', '.join(said)}; {best.seconds:.3g} s a step with all roles"
        return f"the best of {counted(len(choices), 'choice')} of machines for its roles", [told]

    def teaching(self, placed: PlacedPlan) -> float:
        """Seconds in which teachers apart judge the rows of a step of this plan; 0 where there are none."""
        taught = taught_of(self.resolved.job, self._all_facts())
        if self.roles is None or not self.roles.teachers or taught is None:
            return 0.0
        return teaching_seconds(placed.cluster, taught, self.roles.teachers, placed.devices[0])

    def seconds_by_role(self, placed: PlacedPlan, predicted: StepPrediction) -> dict[str, float]:
        """Of a step, what is waited for each role, and what the policy takes; nothing where it is alone. Teachers that
        are apart are waited for in the steps in which they judge what was sampled for these."""
        keys = self.resolved.job.distill
        return predicted_roles(predicted, 0.0 if keys is None else keys.lmbda * self.teaching(placed))

    def evaluation_seconds(self, placed: PlacedPlan) -> float | None:
        """Of an evaluation; None where there is none, or it is not predicted."""
        return self._beside.evaluation(self._asked(placed))

    def _asked(self, placed: PlacedPlan) -> PredictedPlan:
        return PredictedPlan(placed.plan, placed.facts, as_predicted(placed), self.cluster.device)

    def predicted_seconds(self, placed: PlacedPlan, predicted: StepPrediction) -> PredictedSeconds:
        """As a run tells it beside what it measures: of no whole step where programs elsewhere have a part in it."""
        if roles_elsewhere(self.resolved.job):
            by_role = dict(predicted.roles) | {"policy": predicted.policy}
        else:
            by_role = {"step": self.step_seconds(placed, predicted), **self.seconds_by_role(placed, predicted)}
        evaluation = self.evaluation_seconds(placed)
        by_role |= {} if evaluation is None else {"evaluation": evaluation}
        return PredictedSeconds(str(placed.plan), by_role)

    def step_seconds(self, placed: PlacedPlan, predicted: StepPrediction) -> float:
        """Of a step of all roles together, of which the prediction lacks teachers that are apart."""
        taught, teaching = taught_of(self.resolved.job, self._all_facts()), self.teaching(placed)
        return predicted.seconds if taught is None or not teaching else taught_seconds(predicted, taught, teaching)

    def _that_fits(self, search: Callable[[], Found]) -> Found:
        """What is best; where nothing has room for snapshots, without them, unless the job asks for snapshots."""
        try:
            return search()
        except CapacityError:
            if not self.mirrored or self.resolved.origins["mirror_steps"] != DEFAULT:
                raise
            self.mirrored = False
            return search()

    def predicted(self, cluster: Cluster) -> TrainingSearchResult:
        """The plan that is given, on the first devices."""
        assert self.given is not None
        return given_training(self.given, self.spec, cluster, self.facts())

    def facts(self, apart: Collection[RoleName] | None = None) -> TrainingFacts:
        """What of the job decides its cost, without the roles that are `apart` from its ranks: those that the job gives
        to nodes, unless others are given."""
        job = self.resolved.job
        roles = role_nodes(job)
        for role in roles:
            job = with_role_nodes(job, role, ())
        passes = (
            has_value_pass(job, self.spec, self.cluster.device),
            shares_prompts(job, self.spec, self.cluster.device),
        )
        facts = training_facts(job, self.mirrored, self._judges, *passes, self._lengths)
        apart = roles if apart is None else apart
        sampling = None if "rollout" in apart else facts.sampling
        if sampling is not None and (rollouts := self.resolved.job.rollouts) is not None:
            sampling = dataclasses.replace(sampling, ahead=rollouts.max_staleness)
        teacher, reward = None if "teacher" in apart else facts.teacher, None if "reward" in apart else facts.reward
        return dataclasses.replace(facts, teacher=teacher, sampling=sampling, reward=reward)

    def _sizes(self) -> tuple[int, ...]:
        """Sizes of a microbatch: the job's, if it gives one."""
        job = self.resolved.job
        if self.given or self.resolved.origins["microbatch_size"] != DEFAULT:
            return (job.microbatch_size,)
        return tuple(size for size in MICROBATCHES if size <= job.global_batch_size)

    def _refuse(self, plan: Plan, facts: TrainingFacts) -> None:
        from tllm.training.job.combinations import check_combination

        if str(plan) in self.refused:
            raise PlanError(f"the plan {plan} could not begin")
        job = dataclasses.replace(self.resolved.job, microbatch_size=facts.microbatch_size)
        check_combination(job, plan, self.spec)
