"""State in the memory of hosts: where a rank's newest snapshots outlive its process."""
