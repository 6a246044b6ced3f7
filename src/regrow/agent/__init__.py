"""The agent: starts one host's workers, notices their deaths, replaces what died, carries the control plane."""
