"""How keys and values are stored."""

from enum import StrEnum


class KVQuantisation(StrEnum):
    """How an engine stores keys and values in HBM, by LMDeploy's names; ``none``: as the model computes them."""

    NONE = "none"
    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
