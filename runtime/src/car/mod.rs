//! A car's background work as steps: what runs on threads and in processes of its own in a car is
//! here a function that takes one step. The daemon and the sync process call these steps in loops;
//! a simulation of the whole car calls the same steps in an order that it chooses. Never starts a
//! thread and never sleeps.

pub mod follower;
pub mod maintenance_steps;
pub mod sync_steps;
pub mod update_steps;
