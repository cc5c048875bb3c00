"""A method: frozen settings, two server plans, and declared client exchanges. No state in self.

This class is FedAvg. Every other method extends it and overrides only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from harmonium.core import seeds
from harmonium.core.devices import CPU
from harmonium.core.errors import NotEnoughReplies, counted
from harmonium.core.types import ClientId, Kind, Rule, Weights
from harmonium.data.augment.views import Views, preset
from harmonium.data.images import Images
from harmonium.federation import contract, label_free_score, rows, term_metrics
from harmonium.federation import global_objective as overall
from harmonium.federation import site_evaluation as at_sites
from harmonium.federation import whitening as whitened
from harmonium.federation.aggregation import Aggregation, Mean
from harmonium.federation.batch_norm import calibrated, measure, moments
from harmonium.federation.filters.rounding import Transport
from harmonium.federation.filters.update_noise import Updates, declared_with
from harmonium.federation.initialisation import Start, load_encoder_weights, load_other_parts
from harmonium.federation.personal import Own, as_sent
from harmonium.federation.server_optimisers import Average, ServerOptimiser
from harmonium.federation.server_training import public_client
from harmonium.federation.wire import (
    EXAMPLES,
    LABELLED,
    Ask,
    Exchange,
    Plan,
    Value,
    declarations,
    exchange,
    scalar,
    statistic,
    weights,
)
from harmonium.learning.client import Batch, Client, Decline
from harmonium.learning.context import Context
from harmonium.learning.contract import called, checked_network, checked_parts
from harmonium.learning.encoders import Encoder
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives import Objective, Seen
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.parts import BatchNorms, Part, Parts, join
from harmonium.learning.terms import Term
from harmonium.learning.training import Fitted, Local, fit
from harmonium.learning.world import World
from harmonium.privacy.account import Account
from harmonium.privacy.mechanisms import Release

TRAINED = {"model": weights(by=EXAMPLES), "loss": scalar("mean", by=EXAMPLES)}
MEASUREMENTS = (  # exchanges of every method, in the order in which they follow its own
    "calibrate",
    "gauge",
    "appraise",
    "measure_objective",
    "measure_gradient",
    "measure_moments",
    *LABELLED,
)


@dataclass(frozen=True)
class Server:
    """Everything the server keeps between rounds; with the clients' states it is the checkpoint."""

    examples: Mapping[ClientId, int]  # registered number of examples of every client
    model: Weights
    round: int = 0
    memory: Mapping[str, Any] = field(default_factory=dict)  # a method's own; any tree of tensors
    moments: Mapping[str, Any] = field(default_factory=dict)  # the server optimiser's memory
    public: Images | None = None
    account: Account = field(default_factory=Account, compare=False)  # releases so far
    device: torch.device = field(default=CPU, compare=False)  # where plans train on public images

    @property
    def everyone(self) -> list[ClientId]:
        """All clients, in ascending order."""
        return sorted(self.examples)


@dataclass(frozen=True)
class Method:
    """FedAvg over any objective and terms (McMahan et al., 2017)."""

    world: World = World()
    encoder: Encoder = CnnSmall()
    objective: Objective = SimCLR()
    terms: tuple[Term, ...] = ()
    local: Local = Local()
    aggregation: Aggregation = Mean()
    server_optimiser: ServerOptimiser = Average()
    views: Views = preset("simclr")
    batch_norm: BatchNorms = "average"
    updates: Updates | None = None  # protection of whole clients
    transport: Transport = Transport()  # how weights travel
    appraisal: label_free_score.Appraisal | None = None  # how clients score the encoder, if they do
    global_objective: overall.GlobalObjective | None = None  # measured where it can be
    whitening: bool = False  # whether clients send moments of features before evaluation
    site_evaluation: at_sites.SiteEvaluation | None = None  # on labelled images of sites
    initial: Start | None = None  # given weights; none: a random initialisation

    name: ClassVar[str] = "method"
    paper: ClassVar[str] = ""  # authors and year, for lists
    share: ClassVar[Mapping[str, Rule]] = {}  # part -> rule, over its own; * is all
    keeps: ClassVar[Mapping[str, Kind]] = {}  # what it stores at a client, and what that reveals
    remembers: ClassVar[Mapping[str, Kind]] = {}  # what the server keeps in its memory
    context: ClassVar[type[Context]] = Context  # what `fit` hands to `score` and the terms
    uses_labels: ClassVar[bool] = False  # beside what its objective and terms declare
    personal: ClassVar[bool] = False  # each client ends with an encoder of its own
    joint_views: ClassVar[bool | None] = None  # as `Objective.joint_views`, if its code differs
    reveals: ClassVar[str] = ""  # what leaves, in plain words, where kinds do not say enough

    # ==== what a method may override ==========================================================
    # ---- server ------------------------------------------------------------------------------
    def setup(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """The plan that runs once, before round 1; `server.everyone` lists all clients."""
        return server
        yield  # a plan that asks nothing

    def round(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """One round: ask the cohort to train, take the average."""
        got = yield Ask("train", cohort, {"model": server.model})
        return self.merge(server, got.model)

    # ---- client ------------------------------------------------------------------------------
    @exchange(down={"model": weights()}, up=TRAINED)
    def train(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Train the received model on the client's examples."""
        parts = self.pull(client, got.model)
        done = self.fit(parts, client, context=Context(me=client.id, anchor=got.model))
        return {"model": self.push(client, parts), "loss": done.loss}

    # ---- pieces ------------------------------------------------------------------------------
    def see(self, parts: Parts, batch: Batch) -> Seen:
        """What the loss is computed from; override for a method with views of its own."""
        return self.objective.see(parts, batch)

    def score(self, parts: Parts, seen: Seen, context: Any) -> Tensor:
        """The method's own loss; override to replace or extend the objective's.

        `context` is what the method handed to `fit`, an instance of its class `context`.
        """
        return self.objective.score(parts, seen, context)

    def extra_parts(self, modules: Mapping[str, nn.Module], dim: int) -> dict[str, Part]:
        """Parts beyond the encoder's, the objective's and the terms'."""
        return {}

    def suits(self, cohort: int) -> None:
        """Raise an error if a cohort of this size is too small for the method."""

    @classmethod
    def joins_views(cls, objective: Objective) -> bool:
        """Whether views share a BatchNorm pass unless `local.joint_views` says otherwise."""
        return objective.joint_views if cls.joint_views is None else cls.joint_views

    @property
    def needs_public(self) -> bool:
        """Whether a recipe must name public images."""
        return False

    @property
    def workload(self) -> float:
        """Passes over the images that training takes, for each of local.epochs."""
        return 1.0

    def passes_of(self, step: str) -> float:
        """Passes over a client's images that one answer to a step takes at most, of any kind."""
        if step in LABELLED:
            return at_sites.passes(self, step)
        return self.workload * self.local.epochs if step == "train" else 1.0

    def represent(self, server: Server, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The encoder to evaluate: the federation's, or a client's own given its state."""
        if self.recalibrates and "statistics" not in server.memory:
            raise NotEnoughReplies("BatchNorm's statistics were not measured on this model")
        measured, local = server.memory.get("statistics", {}), (state or {}).get("parts", {})
        return self.blueprint.copy_from(server.model, measured, local).eval()["encoder"]

    def own(self, model: Weights, state: Mapping[str, Any]) -> Own:
        """A client's own features for its own tasks, given the model as it last sent it.

        `state` is what the client keeps after that training. With `recalibrate` the model comes
        with the statistics that the client measured on it.
        """
        return Own(as_sent(self, model, state))

    def revealed(self) -> tuple[str, ...]:
        """What leaves a client with these settings, in plain words; one sentence each."""
        return (self.reveals,) if self.reveals else ()

    def extents(self) -> Mapping[str, str]:
        """Sizes of fields that are neither weights nor numbers, in plain words."""
        return {}

    def costs(self, step: str, examples: int) -> Sequence[Release]:
        """The releases of a client with `examples` examples when asked for a step, in order.

        A method with guarded fields overrides it, so that the cost of an ask is known in advance
        and lost answers can be counted. An answer that releases anything else is refused.
        """
        return ()

    def known(self, server: Server, client: ClientId) -> Mapping[str, Any]:
        """What the server knows of a client's state, for `represent`; most often nothing."""
        return {}

    def noted(self, server: Server) -> dict[str, float]:
        """Numbers of this round for the log, beside the means of those that clients sent."""
        return {}

    def remark(self, step: str, up: Mapping[str, Any]) -> str:
        """A note for the ledger on one client's answer, which may still be refused."""
        return ""

    def reply_fault(
        self, step: str, down: Mapping[str, Any], up: Mapping[str, Any], examples: int
    ) -> str | None:
        """Why an answer cannot be an honest client's; none if it can.

        Fields, kinds, shapes and ranges are checked before. Override it for what only the method
        knows, such as rows of unit length, and call `super` as well.

        Args:
            step: the exchange that is answered.
            down: what the client was sent.
            up: what the client sent.
            examples: its registered number of examples.
        """
        if step in LABELLED:
            return at_sites.fault(self, step, up, examples)
        model: Weights = up.get("model", {})
        faults = (term.reply_fault(model) for term in self.terms)
        return next((fault for fault in faults if fault), None)

    def keeping(self) -> Mapping[str, Kind]:
        """What the method stores at a client with these settings; most often all of `keeps`."""
        return self.keeps

    # ==== given to every method, not to be overridden =========================================
    @final
    def run_plan(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """A round, or the setup as round 0; what was measured on the model before is dropped."""
        dropped = ("statistics", overall.KEY, whitened.KEY, at_sites.KEY)
        memory = {key: value for key, value in server.memory.items() if key not in dropped}
        plan = self.round if server.round else self.setup
        steps = plan(replace(server, memory=memory), cohort)
        finished = yield from contract.checked_plan(steps, self, plan.__name__)
        contract.check_finished(finished, Server, self, plan.__name__)
        where, measured = f"{called(self)}.{plan.__name__}", ("measured", *dropped)
        contract.check_kept(finished.memory, {*self.remembers, *measured}, where, "remembers")
        return cast(Server, finished)

    @final
    def before_evaluation(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Make the encoder ready for evaluation: BatchNorm's statistics, and what terms measure."""
        if self.recalibrates and "statistics" not in server.memory:
            server = yield from calibrated(server, cohort)
        if self.measured:
            server = yield from term_metrics.with_term_metrics(server, cohort)
        if self.appraisal is not None:
            yield label_free_score.ask(self, server)
        if self.measures_objective:
            server = yield from overall.measured(self, server)
        if self.whitening:
            server = yield from whitened.fitted(self, server)
        if self.site_evaluation is not None:
            server = yield from at_sites.evaluated(self, server)
        return server

    @final
    def begin(self, server: Server, cohort: Sequence[ClientId]) -> Plan:
        """Measure the global objective of the model at initialisation, if the run measures it."""
        if not self.measures_objective:
            return server
        if self.recalibrates:
            server = yield from calibrated(server, cohort)
        server = yield from overall.measured(self, server)
        return server

    @final
    @exchange(
        down={"encoder": weights(of="encoder")},
        up={
            "statistics": statistic("parts", by="pictures", of="statistics"),
            "pictures": scalar("sum"),  # images measured: the weights of the mean
        },
        when=lambda method: method.recalibrates,
    )
    def calibrate(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Measure BatchNorm's statistics of the received encoder on unaugmented images."""
        parts = self.pull(client, got.encoder)
        batches = (batch.plain for batch in client.batches(1, self.local.batch))
        seen = measure(parts["encoder"], batches)
        if not seen:
            raise Decline(f"it has {counted(len(client.examples), 'example')}, too few to measure")
        return {"statistics": moments(parts.statistics("encoder")), "pictures": seen}

    @final
    @exchange(
        down={"model": weights()},
        up={"measured": term_metrics.MEASURED},
        when=lambda method: method.measured,
    )
    def gauge(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Measure what terms ask for on the received model; nothing is trained."""
        return {"measured": term_metrics.measured(self, client, got.model)}

    @final
    @exchange(
        down={"model": weights()},
        up=label_free_score.up,
        when=lambda method: method.appraisal is not None,
    )
    def appraise(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Score the evaluated encoder on views of the client's images, without labels."""
        return label_free_score.appraised(self, client, got.model)

    @final
    @exchange(
        down={"model": weights()},
        up=overall.MEANS_UP,
        when=lambda method: method.measures_objective,
    )
    def measure_objective(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Means over the client's images for the global objective; nothing is trained."""
        return overall.client_means(self, client, got.model)

    @final
    @exchange(
        down={"model": weights(), "slope": statistic()},
        up=overall.GRADIENT_UP,
        when=lambda method: method.measures_objective and overall.has_gradient(method),
    )
    def measure_gradient(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """The client's share of the global objective's gradient; nothing is trained."""
        return overall.client_gradient(self, client, got.model, got.slope)

    @final
    @exchange(down={"model": weights()}, up=whitened.UP, when=lambda method: method.whitening)
    def measure_moments(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Moments of the evaluated encoder's features over the client's images, for whitening."""
        return whitened.client_moments(self, client, got.model)

    @final
    @exchange(when=lambda method: method.site_evaluation is not None)
    def can_evaluate(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Nothing: a client without enough labelled images declines."""
        return at_sites.client_ready(self, client)

    @final
    @exchange(down={"model": weights()}, up=at_sites.sums_up, when=at_sites.has_sums)
    def measure_sums(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Means over the client's labelled images, for the common classifier."""
        return at_sites.client_sums(self, client, got.model)

    @final
    @exchange(
        down=at_sites.counts_down,
        up=at_sites.counts_up,
        when=lambda method: method.site_evaluation is not None,
    )
    def measure_counts(self, client: Client, got: SimpleNamespace) -> dict[str, Value]:
        """Counts of a classifier's answers to the client's held-out images."""
        classifier = got.classifier if at_sites.has_sums(self) else None
        return at_sites.client_counts(self, client, got.model, classifier)

    @cached_property
    @final
    def measures_objective(self) -> bool:
        """Whether the global objective is measured before an encoder is evaluated."""
        return self.global_objective is not None and not overall.obstacle(self)

    @property
    @final
    def measured(self) -> list[str]:
        """Names of what terms measure on a model before it is evaluated."""
        return term_metrics.names(self.terms, self.objective)

    @final
    def report(self, server: Server) -> dict[str, Any]:
        """What was measured on the model, for the log; empty if nothing was."""
        measured: dict[str, Any] = {}
        if replies := server.memory.get("measured"):
            counts = [server.examples[client] for client in server.everyone]
            shares = [1] * len(counts) if self.server_optimiser.weighting == "uniform" else counts
            measured = term_metrics.report(
                self.terms, self.objective, replies, shares, server.round
            )
        if figures := at_sites.report(server.memory):
            measured[at_sites.FIGURES] = figures
        key, bounds = overall.KEY, measured.get("bounds", {})
        if key in server.memory:
            measured[key] = server.memory[key]
        elif "total" in bounds:
            measured[key] = overall.from_bounds(self.objective.name, bounds)
        return measured

    @property
    @final
    def recalibrates(self) -> bool:
        """Whether BatchNorm's statistics are measured anew before an encoder is evaluated."""
        if self.batch_norm != "recalibrate":
            return False
        sent = self.blueprint.rules["encoder"] == "mean"
        return sent and bool(self.blueprint.statistics("encoder"))

    @property
    @final
    def feature_size(self) -> int:
        """Size of the encoder's feature vectors."""
        return self.encoder.features_for(self.world.channels, self.world.side)

    @property
    @final
    def has_own_encoders(self) -> bool:
        """Whether each client ends with an encoder of its own, if only in its BatchNorms."""
        return self.personal or any(
            rule == "local" and key.startswith("encoder.")
            for key, rule, _ in self.blueprint.tensors()
        )

    @property
    @final
    def reads_labels(self) -> bool:
        """Whether the method, its objective or a term declares that it reads labels."""
        terms = any(term.uses_labels for term in self.terms)
        return self.uses_labels or self.objective.uses_labels or terms

    @final
    def loss(
        self, parts: Parts, context: Context, watch: Callable[[Seen], None] | None = None
    ) -> Callable[[Batch], Tensor]:
        """The local loss of a batch: the score and every term. Methods override `score`.

        `watch` is called with the model's outputs for each batch, before the loss is computed.
        """

        def of(batch: Batch) -> Tensor:
            seen = self.see(parts, batch)
            if watch is not None:
                watch(seen)
            return self.total(parts, seen, context)

        return of

    @final
    def total(self, parts: Parts, seen: Seen, context: Context) -> Tensor:
        """The score and every term."""
        total = self.score(parts, seen, context)
        for term in self.terms:
            total = total + term.score(parts, seen, context)
        return total

    @final
    def fit(
        self,
        parts: Parts,
        client: Client,
        *,
        context: Context | None = None,
        train: Iterable[str] | None = None,
        local: Local | None = None,
        among: Tensor | None = None,
        watch: Callable[[Seen], None] | None = None,
    ) -> Fitted:
        """Train the named parts (default: all) by the method's loss on the client's examples.

        Args:
            parts: the model, which is changed.
            client: whose examples it learns from.
            context: what `score` and the terms are given; none: the client's number alone.
            train: names of the parts that are trained; none: all.
            local: local training in place of the recipe's.
            among: positions of examples in place of those that the objective would take.
            watch: called with the model's outputs for each batch, before the loss is computed.
        """
        context = contract.checked_context(context or Context(me=client.id), self)
        loss = self.loss(parts, context, watch)
        after = partial(self.after_step, parts, context)
        among = self.objective.among(client.examples) if among is None else among
        return fit(parts, client, loss, local or self.local, train=train, after=after, among=among)

    @final
    def after_step(self, parts: Parts, context: Context) -> None:
        """What the objective and the terms do after every step."""
        self.objective.after_step(parts)
        for term in self.terms:
            term.after_step(parts, context)

    @final
    def at_server(self, server: Server, purpose: str) -> Client:
        """The server as a client of the public images, for plans that train on them."""
        return public_client(self, server, purpose)

    @cached_property
    @final
    def blueprint(self) -> Parts:
        """The model that a run starts with: the same bits in every process of a run."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of(self.world.seed, "init"))
            network = self.encoder.build(self.world.channels, self.world.side)
            built = {"encoder": Part(checked_network(network, self.encoder))}
            if self.initial is not None:  # before the other parts, some of which are copies of it
                given = self.initial.weights()
                load_encoder_weights(built["encoder"].module, given)
            world = self.world
            dim = self.feature_size
            builders: list[tuple[object, str, Builder]] = [
                (self.objective, "build", _builder(self.objective, dim, world)),
                (self, "extra_parts", lambda modules: self.extra_parts(modules, dim)),
                *((term, "build", _builder(term, dim, world)) for term in self.terms),
            ]
            for owner, name, build in builders:
                more = build({part: one.module for part, one in built.items()})
                built = join(built, checked_parts(more, owner, name))
        joint = self.local.joint_views
        joint = self.joins_views(self.objective) if joint is None else joint
        parts = Parts(built, self.share, self.batch_norm, joint)
        if self.initial is not None:
            load_other_parts(parts, given)
        if self.encoder.channels_last:  # faster for most convolutions; values are the same
            parts.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return parts

    @final
    def pull(self, client: Client, model: Mapping[str, Tensor]) -> Parts:
        """The model to work on: initialised, then the message's parts, then the client's own."""
        local = client.state.get("parts")
        parts = self.blueprint.copy_from(model, local or {}, device=client.device)
        self.objective.prepare(parts, first=local is None)
        return parts

    @final
    def push(self, client: Client, parts: Parts) -> Weights:
        """Keep local parts in the client's state; return only what may leave."""
        if local := parts.kept():
            client.state["parts"] = local
        return parts.shared(client.id)

    @final
    def merge(self, server: Server, folded: Mapping[str, Any]) -> Server:
        """The server after an optimiser step on the folded uploads and the terms' `at_server`."""
        # The optimiser acts only on what is trained: EMA twins are averages and have no gradient.
        steered = {key for key, p in self.blueprint.named_parameters() if p.requires_grad}
        stepped, moments = rows.step(
            self.server_optimiser,
            dict(server.model),
            folded,
            steered,
            dict(server.moments),
            self.server_optimiser.rate(server.round, self.world.rounds),
            examples=server.examples,
            lazy=self.blueprint.lazy,
        )
        model = {**server.model, **stepped}
        for term in self.terms:
            model = term.at_server(model)
        return replace(server, model=model, moments=moments)

    @final
    def exchanges(self) -> dict[str, Exchange]:
        """The exchanges that the settings use, by name; those that measure come last."""
        return dict(self._exchanges)

    @cached_property
    def _exchanges(self) -> dict[str, Exchange]:
        """Made once: settings never change, and every reply of a run is looked up here."""
        declared = {one.name: one for one in declarations(type(self))}
        order = [name for name in declared if name not in MEASUREMENTS]
        used = [declared[name] for name in (*order, *MEASUREMENTS) if declared[name].applies(self)]
        return {one.name: declared_with(self, one.resolved(self)) for one in used}

    @final
    def declared_exchanges(self) -> dict[str, Exchange]:
        """Every exchange of the class by name, whether the settings use it or not."""
        return {one.name: one.resolved(self) for one in declarations(type(self))}

    @final
    def may_keep(self) -> set[str]:
        """Names that a client's state may hold: what is declared, and local parts if any."""
        more = self.transport.keeping(self)
        return {*self.keeping(), *more, *(["parts"] if self.blueprint.stays else [])}


Builder = Callable[[Mapping[str, nn.Module]], Any]


def _builder(owner: Objective | Term, dim: int, world: World) -> Builder:
    return lambda modules: owner.build(modules, dim, world)
