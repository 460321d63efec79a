"""Who takes part in a round. To add a selection, write its file and name it here."""

from fedsieve.config.registry import Registry

SELECTIONS = Registry(
    uniform="fedsieve.federate.selection.uniform:Uniform",
    by_size="fedsieve.federate.selection.by_size:BySize",
    high_loss="fedsieve.federate.selection.high_loss:HighLoss",
)
