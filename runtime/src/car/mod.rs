//! A car's background work as functions that take one step each. The daemon and the sync process
//! call the steps in loops, on threads of their own. A simulation of the whole car calls the same
//! steps in an order that it chooses. Nothing here but `plan_thread` starts a thread or sleeps.

pub mod follower;
pub mod maintenance_steps;
pub mod plan_steps;
pub mod plan_thread;
pub mod sync_steps;
pub mod update_steps;
