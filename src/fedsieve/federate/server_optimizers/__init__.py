"""How a direction becomes new weights. To add a server optimizer, write its file and name it here."""

from fedsieve.config.registry import Registry

SERVER_OPTIMIZERS = Registry(
    sgd="fedsieve.federate.server_optimizers.sgd:Sgd",
    adam="fedsieve.federate.server_optimizers.adam:Adam",
    yogi="fedsieve.federate.server_optimizers.yogi:Yogi",
    adagrad="fedsieve.federate.server_optimizers.adagrad:Adagrad",
)
