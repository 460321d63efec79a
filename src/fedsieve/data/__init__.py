"""Data: loading, dividing among clients, transforming. Here are the slots: data sets, and splits among clients.

To add one, write its function and name it here.
"""

from fedsieve.config.registry import Registry

DATASETS = Registry(
    cifar100="fedsieve.data.load:load_cifar100",
    digits="fedsieve.data.load:load_digits",
    folder="fedsieve.data.load:load_folder",
    npz="fedsieve.data.load:load_npz",
    given="fedsieve.data.load:load_given",
)

SPLITS = Registry(
    iid="fedsieve.data.partition:split_iid",
    classes="fedsieve.data.partition:split_classes",
    dirichlet="fedsieve.data.partition:split_dirichlet",
    flwr="fedsieve.data.partition:split_flwr",
)
