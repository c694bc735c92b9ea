"""Host memory and disks in place of device memory: where shards rest, and where optimizer state is kept."""
