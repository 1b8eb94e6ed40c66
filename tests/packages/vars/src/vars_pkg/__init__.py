"""One kernel that reads variables which the host sets by name."""
