"""`fedsieve cluster`: what the nodes of a cluster have."""

import json
from typing import Annotated

import typer

from fedsieve.cli.arguments import JsonOption, OverridesArgument, PluginsOption, console

cluster_app = typer.Typer(help="A Ray cluster that runs clients (docs/cluster.md).")
PLAIN = "digits-iid"  # what nodes are told if no experiment is given


@cluster_app.callback()
def cluster() -> None:
    """Keeps `check` a command of its own, as others may follow."""


@cluster_app.command("check")
def cluster_check(
    context: typer.Context,
    experiment: Annotated[
        str | None,
        typer.Argument(metavar="[EXPERIMENT]", help="A preset or a YAML file, whose data each node has to find."),
    ] = None,
    overrides: OverridesArgument = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The cluster; `auto`: the one that this machine is a node of."),
    ] = None,
    as_json: JsonOption = False,
    plugins: PluginsOption = None,
) -> None:
    """Say of each node: versions, devices, whether it computes the same bits, whether it has the data, MB/s to it.

    Without --address: the experiment's cluster, or else a private one. Exit code 1 if a node cannot be used.
    """
    from fedsieve.config.experiment_file import validated
    from fedsieve.config.runnable import loaded
    from fedsieve.config.schema import Experiment

    settings = context.with_resource(loaded(experiment or PLAIN, overrides or [], plugins or []))
    ray_settings = settings.on_ray.model_dump() if settings.on_ray is not None else {}
    engine = {"ray": {**ray_settings, **({"address": address} if address is not None else {})}}
    settings = validated(Experiment, {**settings.model_dump(mode="json"), "engine": engine}).resolved()
    assert settings.on_ray is not None
    from fedsieve.engine.ray_connection import connected, cpus_for

    with connected(settings.on_ray, cpus_for(settings)) as ray:
        from fedsieve.engine.cluster_check import ClusterCheck

        nodes = ClusterCheck(ray, settings, with_data=experiment is not None and not settings.on_ray.send_data).nodes()
    if as_json:
        print(json.dumps([node.as_data() for node in nodes]))
    else:
        from fedsieve.analysis.report.tables import nodes_table

        terminal = console()
        terminal.print(nodes_table(nodes))
        for node in nodes:
            if node.problem is not None:
                terminal.print(f"{node.name} is not used: {node.problem}", soft_wrap=True)
    raise typer.Exit(int(any(node.problem is not None for node in nodes)))
