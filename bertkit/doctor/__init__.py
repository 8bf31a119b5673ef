"""Diagnosis of pre-training runs and token stores: each finding reports a measured number."""
