"""Federated methods: what clients and server do in a round. To add a method, write its file and name it here."""

from fedsieve.config.registry import Registry

METHODS = Registry(
    fedavg="fedsieve.federate.methods.fedavg:FedAvg",
    fedprox="fedsieve.federate.methods.fedprox:FedProx",
    scaffold="fedsieve.federate.methods.scaffold:Scaffold",
    fednova="fedsieve.federate.methods.fednova:FedNova",
    fisher_mixing="fedsieve.federate.methods.fisher_mixing:FisherMixing",
)
