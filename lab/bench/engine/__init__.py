"""What parts of an LMDeploy instance cost."""
