"""How the updates of a round become one direction. To add an aggregator, write its file and name it here."""

from fedsieve.config.registry import Registry

AGGREGATORS = Registry(
    mean="fedsieve.federate.aggregators.mean:Mean",
    active="fedsieve.federate.aggregators.active:Active",
    median="fedsieve.federate.aggregators.median:Median",
    trimmed_mean="fedsieve.federate.aggregators.trimmed_mean:TrimmedMean",
)
