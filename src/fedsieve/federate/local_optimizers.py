"""How clients turn gradients into steps. To add a local optimizer, write its file and name it here."""

from fedsieve.config.registry import Registry

LOCAL_OPTIMIZERS = Registry(
    sgd="fedsieve.sieve.sgdm:SparseSGDM",
    adamw="fedsieve.sieve.adamw:SparseAdamW",
)
