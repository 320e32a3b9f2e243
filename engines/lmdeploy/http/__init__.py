"""The api_server process of an LMDeploy instance: its routes, its middleware, and what reaches the engine process."""

__all__: list[str] = []
