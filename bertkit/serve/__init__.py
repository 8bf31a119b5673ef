"""Every head over HTTP: models, their queues, the routes, and the process around them."""
