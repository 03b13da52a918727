"""The work behind an order: train, evaluate, measure. The same code runs in a client's process and inline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from fleetbed.emulator.algorithms import load_method
from fleetbed.emulator.data import Dataset, Split, open_dataset
from fleetbed.emulator.machine import heap, host
from fleetbed.emulator.machine.calibration import spread
from fleetbed.emulator.method.algorithm import Algorithm, Assignment, Client, Context, Reply, Target
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.method.context import make_context
from fleetbed.emulator.method.job import LocalJob, StepPacer
from fleetbed.emulator.method.local_training import recalibrate
from fleetbed.emulator.method.optimizers import make_optimizer
from fleetbed.emulator.method.schedule import batch_of
from fleetbed.emulator.method.targets import all_inputs, target_tensors
from fleetbed.emulator.processes.forking import one_thread
from fleetbed.emulator.processes.scores import Scores
from fleetbed.emulator.randomness import derive
from fleetbed.emulator.wire.messages import (
    EXTRAS,
    Enrolment,
    Evaluate,
    Evaluated,
    Measure,
    Measured,
    Setup,
    Train,
    kept_name,
)
from fleetbed.emulator.wire.storage import load_bundle, save_bundle
from fleetbed.models.base import Net, any_labels, label_loss
from fleetbed.models.plug_ins import check_unchanged
from fleetbed.models.work import gives_logits, through, usual_parts
from fleetbed.profiles.experiment import AlgorithmChoice

#: a reference time is the median of at least so many repetitions, which together take at least so long
MEASURE_REPETITIONS, MEASURE_SECONDS = 7, 0.5

#: the variants that this process, or its zygote before the fork, has trained a step of
_rehearsed: set[str] = set()


@dataclass(frozen=True)
class TaskRunner:
    """A run as its workers know it: made once in the zygote, inherited by every fork.

    Before the clients are enrolled there is no method: then it can evaluate and measure, but not train.
    """

    folder: Path
    dataset: Dataset
    split: Split
    context: Context
    algorithm: AlgorithmChoice
    method: Algorithm | None = None
    keep_heap: bool = False  # between tasks

    @classmethod
    def open(cls, setup: Setup) -> TaskRunner:
        check_unchanged(setup.files)
        folder, dataset = Path(setup.folder), open_dataset(Path(setup.dataset))
        split = Split.from_json((folder / "partition.json").read_bytes())
        return cls(folder, dataset, split, make_context(setup.config, dataset, split, ()), setup.config.algorithm)

    @property
    def enrolled(self) -> bool:
        return self.method is not None

    def enrol(self, enrolment: Enrolment) -> TaskRunner:
        """The same with these clients, so that it can train."""
        context = replace(self.context, clients=enrolment.clients)
        method = load_method(self.algorithm, context)
        if method.needs.initial_on_client:
            # drawn here, where no memory limit counts it; clients inherit it
            context = context.with_initial()
            method = load_method(self.algorithm, context)
        return replace(self, context=context, method=method, keep_heap=enrolment.keep_heap)

    def warm_up(self) -> None:
        """Touch what all workers share: the data and, by a step of each model in use, libraries and kernels.

        Before the clients are enrolled the smallest model makes the step.
        """
        one_thread()
        self.dataset.touch()
        for variant in self.context.variants or self.context.family.variants[:1]:
            self.rehearse(variant)

    def rehearse(self, variant: str) -> None:
        """Train one step and discard it, so that torch compiles what the variant needs; once, for later forks too."""
        if variant in _rehearsed:
            return
        _rehearsed.add(variant)
        # no client has larger batches than it has samples
        samples = max(2, batch_of(self.context.most_samples, self.context.training.batch))
        self._usual_step(variant, samples)

    def _usual_step(self, variant: str, samples: int) -> None:
        """Train one step of a new model as it is meant to be trained: through all exits, or segment by segment."""
        model = self.context.family.build(variant, self.context.spec).train()
        for part in usual_parts(model):
            order = Measure(task=0, variant=variant, kind="train", part=part, samples=samples, optimise=True)
            self._pass(order, model)()

    def assignment(self, order: Train) -> Assignment:
        """The task as its method sees it."""
        client = Client(order.client, order.variant, len(self.split.train[order.client]))
        return Assignment(client=client, task=order.task, stage=order.stage, round=order.round)

    def train(
        self, order: Train, message: Bundle, pacer: StepPacer | None, device: str = "cpu"
    ) -> tuple[Reply, LocalJob]:
        """Run the client's half of a task; `device` is where its tensors live while it trains."""
        assert self.method is not None, "a client was started before the clients were enrolled"
        kept = None if order.kept is None else load_bundle(self.folder / order.kept, cached=False)
        indices = self.split.train[order.client]
        job = LocalJob(
            context=self.context,
            assignment=self.assignment(order),
            message=message.to(device),
            kept=None if kept is None else kept.to(device),
            device=device,
            dataset=self.dataset,
            indices=indices,
            pacer=pacer,
            most_steps=order.most_steps,
        )
        # dropout and other layers draw from torch's global stream: keyed too, so that no other task shifts it
        if device == "cpu":  # torch.manual_seed would also note the call, with its stack, for GPUs that are not in use
            torch.default_generator.manual_seed(job.seed("model"))
        else:
            torch.manual_seed(job.seed("model"))
        return self.method.client(job), job

    def keep(self, order: Train, keep: Bundle | None) -> str | None:
        """Store what the client keeps as a file of this task; the server commits its name with the merge."""
        if keep is None:
            return None
        name = kept_name(order.client, order.task)
        save_bundle(self.folder / name, keep, cached=False)
        return name

    def evaluate(self, order: Evaluate, message: Bundle) -> Evaluated:
        # a service that was forked before the clients were enrolled has no method yet
        method = self.method or load_method(self.algorithm, self.context)
        extras = message.under(EXTRAS)
        own = {name: tensor for name, tensor in message.tensors.items() if not name.startswith(EXTRAS)}
        target = Target(name="", variant=order.variant, prefix=order.prefix, tensors=own)
        kept = None if order.kept is None else load_bundle(self.folder / order.kept)
        tensors = target_tensors(target, self.context, kept)
        model = self.context.family.load(order.variant, self.context.spec, tensors, "the model to evaluate").eval()
        if order.recalibrate:
            recalibrate(model, all_inputs(self.dataset, self.split, order.batch))
        if order.local_client is None:
            rows = np.arange(len(self.dataset.y_test))
        else:
            rows = self.split.test[order.local_client]
        scores = Scores(self.context.spec)
        with torch.inference_mode():
            for start in range(0, len(rows), order.batch):
                x, y = self.dataset.batch("test", rows[start : start + order.batch], None)
                scores.add(method.predict(model, x, extras), y)
        return scores.evaluated(order.task)

    def measure(self, order: Measure) -> Measured:
        """Measure the reference time of a pass, hot; the broker makes sure that nothing else runs."""
        torch.manual_seed(derive(self.context.seed, "measure"))
        if order.once:
            self._usual_step(order.variant, order.samples)
            return Measured(task=order.task, seconds=0.0)
        heap.keep()  # a client's heap keeps what a step frees; without a limit it does so for all sizes
        model = self.context.family.build(order.variant, self.context.spec).train()
        once = self._pass(order, model)
        once()
        times: list[float] = []
        meter = host.LoadMeter()
        while len(times) < MEASURE_REPETITIONS or sum(times) < MEASURE_SECONDS:
            start = time.perf_counter()
            once()
            times.append(time.perf_counter() - start)
        return Measured(
            task=order.task,
            seconds=statistics.median(times),
            spread=spread(times),
            other_cores=meter.other_cores(),
        )

    def _pass(self, order: Measure, model: Net) -> Callable[[], None]:
        spec = self.context.spec
        if order.samples == 1:  # batch norm cannot train on it
            model.eval()
        x: Tensor
        if spec.vocabulary:
            x = torch.randint(spec.vocabulary, (order.samples, *spec.shape))
        else:
            x = torch.randn(order.samples, *spec.shape)
        y = any_labels(spec, order.samples)
        optimizer = make_optimizer(self.context.training.optimizer, model)
        anchor = [p.detach().clone() for p in model.parameters()] if order.kind == "parameters" else []
        with torch.no_grad():
            before = {"intermediate": "extract", "classifier": "features"}.get(str(order.part))
            s = getattr(model, before)(x) if before else x
        run = through(model, order.part)

        def parameters() -> None:
            with torch.no_grad():
                for p, a in zip(model.parameters(), anchor, strict=True):
                    a.lerp_(p, 0.5)

        def forward() -> None:
            with torch.no_grad():
                run(s)

        def train() -> None:
            losses = [label_loss(out, y) if gives_logits(order.part) else out.square().mean() for out in run(s)]
            reduce(torch.add, losses).backward()
            if order.optimise:
                optimizer.step()
            optimizer.zero_grad()

        def first() -> None:
            heap.give_back()
            received = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            taken_up = self.context.family.load(order.variant, spec, received).train()
            self._pass(structs.replace(order, kind="train"), taken_up)()

        return {"parameters": parameters, "forward": forward, "train": train, "first": first}[order.kind]
