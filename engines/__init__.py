"""Engine integrations: LMDeploy (deep), and the models that demos and tests run on."""

__all__: list[str] = []
