"""What was sent to the worker and what came back: kept in files, checked, fed to a worker again, looked into."""
