"""How the updates of a round become one direction. To add an aggregator, write its file and name it here."""

from fedsieve.config.registry import Registry

AGGREGATORS = Registry(
    mean="fedsieve.federate.aggregators.mean:Mean",
    active="fedsieve.federate.aggregators.active:Active",
)
