"""What users get of a recorded trace: kvgate, stock LMDeploy and other servers side by side."""
