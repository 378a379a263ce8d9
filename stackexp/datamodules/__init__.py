"""LightningDataModules: token shards, named sets, formal languages."""
