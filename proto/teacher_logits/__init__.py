"""The contract between a teacher-logit server and its clients: rules, layouts, schema, errors."""

__version__ = "0.1.0"
