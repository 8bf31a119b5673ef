"""Serve every head over HTTP: models, request queues, routes and the server process."""
