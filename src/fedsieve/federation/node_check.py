"""Whether a node could take part: its data, its versions, its model and its last bits, before anything is sent."""

import numpy as np

from fedsieve.config.data_settings import DataSettings
from fedsieve.config.experiment_file import load_experiment
from fedsieve.data.shards import read_shard
from fedsieve.engine.node_facts import facts
from fedsieve.engine.torch_setup import configure_torch
from fedsieve.errors import InputError
from fedsieve.federation.node import NodeSetup
from fedsieve.model.classifier import build_classifier

PLAIN = "digits-iid"  # if the owner names no experiment


def checked(setup: NodeSetup) -> dict[str, str]:
    """What there is to say, by topic; InputError if something is not in order."""
    experiment = setup.pinned or load_experiment(PLAIN).resolved()
    samples, classes = read_shard(setup.data, experiment.data if setup.pinned else DataSettings(image_size=32))
    counts = np.bincount(samples.labels.numpy(), minlength=len(classes))
    found = {"data": f"{len(samples):,} samples of {np.count_nonzero(counts)} of {len(classes)} classes: {setup.data}"}
    if setup.device is not None:
        experiment = experiment.model_copy(update={"device": setup.device}).resolved()
    configure_torch(experiment)
    mine = facts(experiment)
    found["versions"] = f"fedsieve {mine['fedsieve']} (files {mine['files']}), torch {mine['torch']}"
    found["device"] = f"{experiment.device} ({mine['cpu']})"
    found["canary"] = f"{mine['canary'][:16]}; another machine with the same one computes the same bits"
    if setup.pinned is not None or setup.backbone is not None:
        model = experiment.model
        if setup.backbone is not None:
            model = model.model_copy(update={"backbone": setup.backbone})
        classifier = build_classifier(experiment.model_copy(update={"model": model}), classes, None)
        weights = sum(one.numel() for one in classifier.parameters())
        found["model"] = f"{weights:,} weights: {model.backbone}"
        if (reason := setup.owner.refusal(experiment)) is not None:
            raise InputError(f"--experiment: {reason}")
    return found
